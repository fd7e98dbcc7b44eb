"""Program of the two ranks of `test_megatron_routing_replay.py`.

python -m tests.ranks.training.megatron_routing_ranks <rank> <port> <model with experts> <folder>
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlscale.config import AlgoConfig, MegatronConfig
from rlscale.data.batch import build_batch
from rlscale.engines.embedded.load_decoder import load_decoder
from rlscale.engines.embedded.scheduler import Scheduler
from rlscale.engines.embedded.scheduler_options import SchedulerOptions
from rlscale.engines.embedded.weight_store import WeightStore
from rlscale.engines.server.generate_request import GenerateRequest
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.megatron.backend import MegatronBackend
from rlscale.training.spec import TrainerSpec
from rlscale.types import Group, Prompt, Sample, SampleStatus, SamplingParams, TrainBatch
from tests.ranks.training.megatron_ranks import megatron_spec
from tests.unit.training.rollouts import plan

NUM_EXPERTS = 4
PROMPTS = ((5, 9, 3, 7, 2), (8, 4, 11), (3, 3, 12, 6, 10, 2, 9))
CUTS = [[[0, 3], [1]], [[2, 5], [4]]]  # samples of each micro-batch, by step
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "ep2": {"expert_model_parallel_size": 2},
    "tp2": {"tensor_model_parallel_size": 2, "core_args": {"sequence_parallel": True}},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}


def generate(path: str, dtype: torch.dtype) -> TrainBatch:
    """Two responses to each prompt by the embedded engine, with its routes."""
    device = torch.device("cpu")
    decoder, _ = load_decoder(path, lambda _: ({}, {}), dtype=dtype, device=device, max_context_len=None)
    weights = WeightStore(decoder.weights, decoder.aliases, receiver=None, checksum=None, version="0")
    scheduler = Scheduler(decoder, weights, SchedulerOptions(num_slots=8, num_threads=1))
    scheduler.start()
    groups = []
    for index, ids in enumerate(PROMPTS):
        params = SamplingParams(max_new_tokens=20 + 7 * index, sampling_seed=index, ignore_eos=True)
        request = GenerateRequest(rid=str(index), input_ids=ids, params=params, n=2, return_routes=True)
        prompt = Prompt(index=index, text="", token_ids=ids)
        samples = []
        for j, answer in enumerate(scheduler.submit(request).result(timeout=60)):
            sample = Sample(index=2 * index + j, group_index=index, prompt=prompt, seed=0, reward=float(j))
            sample.append(
                answer.output_ids,
                logprobs=answer.logprobs,
                weight_versions=[0] * len(answer.output_ids),
                routes=None if answer.routes is None else answer.routes.astype(np.uint8),
            )
            sample.status = SampleStatus.completed
            samples.append(sample)
        groups.append(Group(index=index, prompt=prompt, samples=samples))
    scheduler.close()
    return build_batch(groups, 0)


def with_other_routes(batch: TrainBatch) -> TrainBatch:
    """Shifts the experts of every token by one; the first sample has no routes."""
    assert batch.routes is not None
    unknown = np.iinfo(batch.routes.dtype).max
    routes = np.where(batch.routes == unknown, unknown, (batch.routes + 1) % NUM_EXPERTS).astype(batch.routes.dtype)
    routes[: batch.offsets[1]] = unknown
    return replace(batch, routes=routes)


def trained(spec: TrainerSpec, batch: TrainBatch, sizes: Mapping[str, Any], *, rank: int) -> dict[str, Any]:
    """Trains two optimiser steps on a rollout. Returns metrics, old logprobs and weights."""
    config = MegatronConfig(**{"recompute_granularity": "full", **sizes})
    backend = MegatronBackend(replace(spec, megatron=config), rank=rank, world_size=dist.get_world_size())
    shared = [config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.context_parallel_size]
    num_shares = dist.get_world_size() // int(np.prod(shared))
    cuts = [[cut[i::num_shares] for i in range(num_shares)] for cut in CUTS]
    plans = [
        replace(plan(batch, each), scoring=tuple((tuple(i for m in micros for i in m),) for micros in each))
        for each in cuts
    ]
    result = backend.train(replace(batch, logprob_samples=tuple(range(batch.num_samples))), plans)
    found = [{name: weight.clone() for name, weight in backend.weights()}]
    dist.broadcast_object_list(found, src=0)
    backend.close()
    return {
        "steps": [{**step, **result.metrics} for step in result.steps],
        "logprobs": torch.cat([torch.from_numpy(result.logprobs[i]) for i in range(batch.num_samples)]),
        "weights": found[0],
    }


def balancing_norm(spec: TrainerSpec, sizes: Mapping[str, Any], *, num_micros: int, rank: int) -> float:
    """Norm of the gradient of the losses that balance experts alone; all micro-batches hold equal samples."""
    losses = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
    config = MegatronConfig(**{**sizes, "core_args": {**losses, **sizes.get("core_args", {})}})
    backend = MegatronBackend(replace(spec, megatron=config), rank=rank, world_size=dist.get_world_size())
    one = [config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.context_parallel_size]
    num_shares = dist.get_world_size() // int(np.prod(one))
    prompt = Prompt(index=0, text="", token_ids=PROMPTS[0])
    samples = []
    for index in range(num_micros * num_shares):
        sample = Sample(index=index, group_index=0, prompt=prompt, seed=0, reward=1.0, status=SampleStatus.completed)
        sample.append(range(3, 14), logprobs=[-1.0] * 11, weight_versions=[0] * 11)
        samples.append(sample)
    batch = build_batch([Group(index=0, prompt=prompt, samples=samples)], 0)
    cuts = [[[share * num_micros + i] for i in range(num_micros)] for share in range(num_shares)]
    result = backend.train(batch, [plan(batch, cuts)])
    backend.close()
    return result.steps[0]["grad_norm"]


def logprobs_with_routes(path: str, batch: TrainBatch) -> Tensor:
    """Logprobs of the responses without the first sample, by transformers with the given experts."""
    assert batch.routes is not None
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    columns = []
    for i in range(1, batch.num_samples):
        start, stop, prompt_len = int(batch.offsets[i]), int(batch.offsets[i + 1]), int(batch.prompt_lens[i])
        tokens = torch.from_numpy(batch.tokens[start:stop].astype(np.int64))
        chosen = torch.from_numpy(batch.routes[start : stop - 1].astype(np.int64))
        hooks = [
            layer.mlp.gate.register_forward_hook(_choosing(chosen[:, number]))
            for number, layer in enumerate(model.model.layers)
        ]
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0]
        for hook in hooks:
            hook.remove()
        logprobs = logits.log_softmax(dim=-1).gather(1, tokens[1:, None])[:, 0]
        columns.append(logprobs[prompt_len - 1 :])
    return torch.cat(columns)


def _choosing(chosen: Tensor) -> Callable[[nn.Module, Any, Any], Any]:
    def choose(router: nn.Module, given: Any, found: Any) -> Any:
        shares = found[0].softmax(dim=-1).gather(1, chosen)
        return found[0], shares / shares.sum(dim=-1, keepdim=True), chosen

    return choose


def max_abs(values: Tensor) -> float:
    return float(values.abs().max())


def difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Largest differences of metrics, relative to max(1, value), and of weights."""
    steps = zip(one["steps"], other["steps"], strict=True)
    numbers = [abs(a[name] - b[name]) / max(1.0, abs(b[name])) for a, b in steps for name in b]
    weights = [max_abs(weight - other["weights"][name]) for name, weight in one["weights"].items()]
    return {"numbers": max(numbers), "weights": max(weights)}


def main(rank: int, port: int, path: str, folder: Path) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    algo = AlgoConfig(use_rollout_routing_replay=True, use_rollout_logprobs=False)
    spec = replace(megatron_spec(path, MegatronConfig(), lr=0.01), algo=algo, ref_path=None)
    own = replace(spec, algo=replace(algo, use_rollout_routing_replay=False))
    found = [generate(path, torch.bfloat16) if rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    batch = found[0]
    assert batch is not None
    base, routed_by_trainer = trained(spec, batch, {}, rank=rank), trained(own, batch, {}, rank=rank)
    moved = trained(spec, with_other_routes(batch), {}, rank=rank)
    first = int(batch.offsets[1] - batch.prompt_lens[0])  # tokens of the first response
    before = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    gates = {name: weight for name, weight in base["weights"].items() if name.endswith("mlp.gate.weight")}
    expected = logprobs_with_routes(path, with_other_routes(batch))
    report = {
        "steps": base["steps"],
        "steps with other routes": moved["steps"],
        "lengths": np.diff(batch.offsets).tolist(),
        "difference to the engine": base["steps"][0]["logprob_diff/mean"],
        "difference without": routed_by_trainer["steps"][0]["logprob_diff/mean"],
        "moves": max_abs(moved["logprobs"][first:] - base["logprobs"][first:]),
        "follows": max_abs(moved["logprobs"][first:] - expected),
        "stays": max_abs(moved["logprobs"][:first] - routed_by_trainer["logprobs"][:first]),
        "gates": [max_abs(weight - before[name]) for name, weight in gates.items()],
        "balancing": [balancing_norm(own, {}, num_micros=number, rank=rank) for number in (1, 3)],
        "balancing by layout": {name: balancing_norm(own, x, num_micros=2, rank=rank) for name, x in LAYOUTS.items()},
        "layouts": {name: difference(trained(spec, batch, sizes, rank=rank), base) for name, sizes in LAYOUTS.items()},
    }
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    # The reports are on disk. Threads of torch.distributed sometimes abort an interpreter that shuts down.
    os._exit(0)
