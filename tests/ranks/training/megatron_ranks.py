"""Program of the trainer ranks of `test_megatron_backend.py`, which compares both backends.

python -m tests.ranks.training.megatron_ranks <rank> <port> <dense> <with experts> <other dense> <deeper> <latent>
    <folder> <kind>
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer
from safetensors.torch import load_file, save_file

from rlscale.config import AlgoConfig, BatchConfig, MegatronConfig, ModelConfig, QkvFormat
from rlscale.data.microbatch_plan import plan_steps
from rlscale.errors import WorkerError
from rlscale.protocols import TrainBackend
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.megatron.backend import MegatronBackend
from rlscale.training.spec import TrainerSpec
from rlscale.types import TrainBatch
from tests.ranks.training import megatron_roles
from tests.ranks.training.fsdp_ranks import BATCHES as RANDOM
from tests.ranks.training.fsdp_ranks import full_spec, whole_rollout_spec
from tests.unit.training.rollouts import plan

SAMPLES = [[0, 5, 6], [1, 2], [3, 4, 7], []]
"""Micro-batches of a step. With two data-parallel ranks each has two of them, and one of these is empty."""

# transformers gives the embedding of the padding token, 0, no gradient; Megatron-core does not treat it specially.
BATCHES = [replace(batch, tokens=np.where(batch.tokens == 0, 14, batch.tokens)) for batch in RANDOM]
SAVED_AFTER = 2
BY_TOKENS = BatchConfig(
    rollout_batch_size=2, n_samples_per_prompt=4, use_dynamic_batch_size=True, max_tokens_per_gpu=40
)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A parallel layout. `sizes` are fields of MegatronConfig, `more` are fields of Megatron-core."""

    sizes: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    has_experts: bool = False
    is_latent: bool = False  # latent attention, and experts that are chosen with a bias
    num_ranks: int = 2
    is_slow: bool = False  # not part of the short tests
    is_padded: bool = False  # one sample per row
    is_dynamic: bool = False  # micro-batches are limited by tokens and planned as in a run

    @property
    def model(self) -> int:
        """Index into the models that are passed to the ranks."""
        return 4 if self.is_latent else int(self.has_experts)

    @property
    def config(self) -> MegatronConfig:
        sizes = {SHORT.get(name, name): value for name, value in self.sizes.items()}
        return MegatronConfig(**sizes, core_args=dict(self.more))


SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
ROLES = ("pp2",)
MORE_ROLES = ("tp2", "ep2", "cp2 dp2")  # slow
DISTILLED = {"tp2": ("full", "top_k"), "pp2": ("full",), "cp2": ("top_k",)}
"""Divergences from a teacher that are compared in the short tests; those of `MORE_ROLES` have both."""
RESUMED = ("dp2", "dp2, whole optimiser on each", "tp2", "pp2", "ep2", "pp2, latent")
RESHARDED = {"pp2": "dp2", "pp2, latent": "tp2, latent"}
REPLAYS = {(2, False): ("ep2",), (2, True): ("tp2, etp2",), (4, True): ("ep2 cp2", "ep2 pp2")}
LATENT_REPLAYS = ("tp2, latent",)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
MORE_RESHARDED = {"tp2, etp2": "ep2"}
SEQUENCES = {"sequence_parallel": True}
INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2}
PARTIAL = {"num_microbatches_with_partial_activation_checkpoints": 1}
MODES: dict[str, Mode] = {
    "dp2": Mode(),
    "dp2, whole optimiser on each": Mode(sizes={"use_distributed_optimizer": False}, is_slow=True),
    "tp2": Mode(sizes={"tp": 2}),
    "tp2, sequence-parallel": Mode(sizes={"tp": 2}, more=SEQUENCES),
    "pp2": Mode(sizes={"pp": 2}),
    "pp2, recomputed in part": Mode(sizes={"pp": 2, "recompute_granularity": "full"}, more=PARTIAL),
    "pp2, one length": Mode(sizes={"pp": 2, "variable_seq_lengths": False, "seq_length": 96}, is_slow=True),
    "pp2, interleaved": Mode(sizes={"pp": 2}, more=INTERLEAVED, is_slow=True),
    "cp2": Mode(sizes={"cp": 2}),
    "cp2, padded": Mode(sizes={"cp": 2}, is_padded=True, is_slow=True),
    "tp2, padded": Mode(sizes={"tp": 2}, more=SEQUENCES, is_padded=True, is_slow=True),
    "pp2, interleaved, padded": Mode(sizes={"pp": 2}, more=INTERLEAVED, is_padded=True, is_slow=True),
    "dp2, padded": Mode(is_padded=True, is_slow=True),
    "ep2, padded, recomputed": Mode(
        sizes={"ep": 2, "recompute_granularity": "full"}, has_experts=True, is_padded=True, is_slow=True
    ),
    "pp2, interleaved, by tokens": Mode(sizes={"pp": 2}, more=INTERLEAVED, is_dynamic=True, is_slow=True),
    "tp2, recomputed": Mode(sizes={"tp": 2, "recompute_granularity": "full"}, more=SEQUENCES, is_slow=True),
    "cp2, selective recompute": Mode(sizes={"cp": 2, "recompute_granularity": "selective"}, is_slow=True),
    "dp2, full recompute": Mode(sizes={"recompute_granularity": "full"}, is_slow=True),
    "dp2, selective recompute": Mode(sizes={"recompute_granularity": "selective"}, is_slow=True),
    "ep2": Mode(sizes={"ep": 2}, has_experts=True),
    "tp2, latent": Mode(
        sizes={"tp": 2}, more={**SEQUENCES, "expert_tensor_parallel_size": 2}, has_experts=True, is_latent=True
    ),
    "pp2, latent": Mode(sizes={"pp": 2}, has_experts=True, is_latent=True),
    "ep2, latent": Mode(sizes={"ep": 2}, has_experts=True, is_latent=True, is_slow=True),
    "cp2, latent": Mode(sizes={"cp": 2}, has_experts=True, is_latent=True, is_slow=True),
    "tp2, etp2": Mode(
        sizes={"tp": 2}, more={**SEQUENCES, "expert_tensor_parallel_size": 2}, has_experts=True, is_slow=True
    ),
    "tp2 pp2": Mode(sizes={"tp": 2, "pp": 2}, more=SEQUENCES, num_ranks=4, is_slow=True),
    "tp2 cp2": Mode(sizes={"tp": 2, "cp": 2}, more=SEQUENCES, num_ranks=4, is_slow=True),
    "pp2 dp2": Mode(sizes={"pp": 2}, num_ranks=4, is_slow=True),
    "pp2 dp2, by tokens, recomputed": Mode(
        sizes={"pp": 2, "recompute_granularity": "full"}, num_ranks=4, is_dynamic=True, is_slow=True
    ),
    "cp2 dp2": Mode(sizes={"cp": 2}, num_ranks=4, is_slow=True),
    "pp2 cp2, interleaved": Mode(sizes={"pp": 2, "cp": 2}, more=INTERLEAVED, num_ranks=4, is_slow=True),
    "tp2 ep2": Mode(
        sizes={"tp": 2, "ep": 2},
        more={**SEQUENCES, "expert_tensor_parallel_size": 1},
        has_experts=True,
        num_ranks=4,
        is_slow=True,
    ),
    "ep2 pp2": Mode(sizes={"pp": 2, "ep": 2}, has_experts=True, num_ranks=4, is_slow=True),
    "ep2 cp2": Mode(sizes={"cp": 2, "ep": 2}, has_experts=True, num_ranks=4, is_slow=True),
}


def megatron_spec(model_path: str, config: MegatronConfig, **changes: Any) -> TrainerSpec:
    return full_spec(model_path, megatron=config, model=ModelConfig(use_hf_config_for_megatron=True), **changes)


def cut(num_data_ranks: int) -> Sequence[Sequence[Sequence[int]]]:
    """`SAMPLES` by data-parallel rank, the same number of micro-batches for each."""
    return [SAMPLES[i::num_data_ranks] for i in range(num_data_ranks)]


def train(
    backend: TrainBackend, batch: TrainBatch, num_data_ranks: int, *, by_tokens: bool = False
) -> dict[str, float]:
    steps = [plan(batch, cut(num_data_ranks))]
    if by_tokens:
        steps = plan_steps(batch, BY_TOKENS, num_ranks=num_data_ranks)
        numbers = {len(micros) for micros in steps[0].microbatches}
        assert len(steps) == len(numbers) == 1 and numbers.pop() > 1, "the same number for every rank, above one"
    result = backend.train(batch, steps)
    return {**result.steps[0], **result.metrics}


def weights_of(backend: TrainBackend) -> dict[str, torch.Tensor]:
    """The weights that rank 0 exports, on every rank."""
    found = [{name: weight.clone() for name, weight in backend.weights()}]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def data_ranks(config: MegatronConfig) -> int:
    shared = config.tensor_model_parallel_size * config.pipeline_model_parallel_size * config.context_parallel_size
    return dist.get_world_size() // shared


@dataclass(kw_only=True)
class TrainingRun:
    """Metrics of three steps, and the weights after them."""

    steps: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    moved: float = 0.0  # largest share of tokens that routing replay sends to other experts

    @classmethod
    def from_backend(cls, backend: TrainBackend, *, num_data_ranks: int, by_tokens: bool = False) -> TrainingRun:
        steps = [train(backend, batch, num_data_ranks, by_tokens=by_tokens) for batch in BATCHES]
        return cls(steps=steps, weights=weights_of(backend))


def difference(one: TrainingRun, other: TrainingRun) -> dict[str, Any]:
    """Largest differences of metrics, relative to max(1, value), and of weights."""
    names = {name for step, theirs in zip(one.steps, other.steps, strict=True) for name in set(step) ^ set(theirs)}
    numbers = {
        name: max(abs(a[name] - b[name]) / max(1.0, abs(b[name])) for a, b in zip(one.steps, other.steps, strict=True))
        for name in one.steps[0]
        if name in other.steps[0]
    }
    weights = {n: float((w - other.weights[n]).abs().max()) for n, w in one.weights.items() if n in other.weights}
    return {
        "numbers": numbers,
        "weights": weights,
        "other names": sorted(set(one.weights) ^ set(other.weights)) + sorted(names),
    }


def resumed(spec: TrainerSpec, folder: Path, *, rank: int) -> dict[str, bool]:
    """Whether a run that is loaded after `SAVED_AFTER` steps continues bitwise as the saved one."""
    world_size, shares = dist.get_world_size(), data_ranks(spec.megatron)
    first = MegatronBackend(spec, rank=rank, world_size=world_size)
    for batch in BATCHES[:SAVED_AFTER]:
        train(first, batch, shares)
    if rank == 0:
        folder.mkdir()
    dist.barrier()
    first.save(folder)
    number, weights = train(first, BATCHES[SAVED_AFTER], shares), weights_of(first)
    first.export_hf(folder / "hf")
    first.close()
    second = MegatronBackend(spec, rank=rank, world_size=world_size)
    second.load(folder)
    same = train(second, BATCHES[SAVED_AFTER], shares) == number
    loaded = weights_of(second)
    if rank == 0:
        save_file(weights, folder / "final.safetensors")
    return {"numbers": same, "weights": all(torch.equal(loaded[name], weight) for name, weight in weights.items())}


def moved_bias(path: str, config: MegatronConfig, *, rank: int) -> list[float]:
    """The bias of a router after a step with a nonzero update rate."""
    moving = replace(config, core_args={**config.core_args, "moe_router_bias_update_rate": 0.25})
    spec = replace(megatron_spec(path, moving), algo=AlgoConfig(), ref_path=None)
    backend = MegatronBackend(spec, rank=rank, world_size=dist.get_world_size())
    train(backend, BATCHES[0], data_ranks(moving))
    found: list[float] = weights_of(backend)[BIAS].tolist()
    backend.close()
    return found


def kl_to_saved(spec: TrainerSpec, folder: Path, *, rank: int) -> float:
    """The KL loss between the saved policy and a reference that is loaded from the same folder."""
    backend = MegatronBackend(replace(spec, ref_checkpoint=folder), rank=rank, world_size=dist.get_world_size())
    backend.load(folder)
    kl = train(backend, BATCHES[0], data_ranks(spec.megatron))["kl_loss"]
    backend.close()
    return kl


def all_scoring_passes(spec: TrainerSpec, reference: str, *, rank: int) -> dict[str, Any]:
    """Compares both backends in a step with every scoring pass, with separate micro-batches for these passes."""
    algo = whole_rollout_spec(spec.model_path).algo
    spec = replace(spec, algo=algo, ref_path=reference)
    size, shares = dist.get_world_size(), data_ranks(spec.megatron)
    fsdp: TrainBackend = FsdpBackend(spec, rank=rank, world_size=size)
    expected = TrainingRun(steps=[train(fsdp, BATCHES[0], size)], weights=weights_of(fsdp))
    ours = MegatronBackend(spec, rank=rank, world_size=size)
    scoring = tuple((tuple(i for micro in own for i in micro),) for own in cut(shares))
    result = ours.train(BATCHES[0], [replace(plan(BATCHES[0], cut(shares)), scoring=scoring)])
    found = difference(TrainingRun(steps=[{**result.steps[0], **result.metrics}], weights=weights_of(ours)), expected)
    ours.close()
    return found


def run_with_replay(spec: TrainerSpec, *, rank: int) -> TrainingRun:
    """Two rollouts of two large steps each; old logprobs use other micro-batches. Sets `moved`."""
    shares = data_ranks(spec.megatron)
    backend = MegatronBackend(spec, rank=rank, world_size=dist.get_world_size())
    pairs = [SAMPLES[:2], SAMPLES[2:]]
    cuts = [[pair[i::shares] or [[]] for i in range(shares)] for pair in pairs]
    steps = []
    for batch in BATCHES[:2]:
        plans = [replace(plan(batch, each), scoring=tuple(_merged(micros) for micros in each)) for each in cuts]
        result = backend.train(batch, plans)
        steps += [{**step, **result.metrics} for step in result.steps]
    run = TrainingRun(steps=steps, weights=weights_of(backend))
    run.moved = max(step.get("routes/differing", 0.0) for step in steps)
    backend.close()
    return run


def _merged(micros: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Merges micro-batches into one."""
    return (tuple(i for micro in micros for i in micro),)


def compare_replays(path: str, modes: Sequence[str], *, rank: int) -> dict[str, Any]:
    """Compares routing replay in several modes with plain data parallelism, and with no replay."""
    algo = AlgoConfig(use_rollout_logprobs=False, use_routing_replay=True)
    without = {"algo": replace(algo, use_routing_replay=False), "ref_path": None}
    base = replace(megatron_spec(path, MegatronConfig(), lr=0.03), algo=algo, ref_path=None)
    expected, plain = run_with_replay(base, rank=rank), run_with_replay(replace(base, **without), rank=rank)
    differs = max(difference(expected, plain)["weights"].values())
    report: dict[str, Any] = {"moved": expected.moved, "differs": differs}
    if modes not in (REPLAYS[2, False], LATENT_REPLAYS):  # else the tests take too long
        still = replace(base, optim=replace(base.optim, lr=0.0))
        one, other = (run_with_replay(each, rank=rank) for each in (still, replace(still, **without)))
        report["with lr 0"] = difference(one, other)["numbers"]
    for name in modes:
        sizes = replace(MODES[name].config, recompute_granularity="full")  # type: ignore[arg-type]
        report[name] = difference(run_with_replay(replace(base, megatron=sizes), rank=rank), expected)
    return report


def roles(mode: Mode, path: str, other: str, folder: Path, *, rank: int, larger: str) -> dict[str, Any]:
    """Compares a run with all roles on Megatron-core and on FSDP2."""
    spec, shares = megatron_roles.all_roles_spec(path, other, mode.config), data_ranks(mode.config)
    steps, weights = megatron_roles.expected(path, other, rank=rank)
    found = megatron_roles.train_with_offload(spec, folder, rank=rank, num_data_ranks=shares)
    ours = TrainingRun(steps=found["rollouts"], weights=found["weights"])
    report = {
        "difference": difference(ours, TrainingRun(steps=steps, weights=weights)),
        "resumed exactly": found["resumed exactly"],
        "bytes when offloaded": found["bytes when offloaded"],
    }
    if mode in (MODES[name] for name in ROLES):
        return report  # else the tests take too long
    further = {"rank": rank, "num_data_ranks": shares}
    return report | {
        "dedicated critic": megatron_roles.dedicated_critic_difference(spec, **further),
        "teacher": 0.0
        if mode.has_experts
        else megatron_roles.larger_teacher_difference(spec, larger, rank=rank, num_data_ranks=shares),
    }


def nan_on_last_rank(spec: TrainerSpec, *, rank: int) -> str:
    """The error message of every rank when the loss is NaN on the last rank only."""
    batch, shares = BATCHES[0], data_ranks(spec.megatron)
    logprobs = batch.rollout_logprobs.copy()
    logprobs[batch.offsets[1] : batch.offsets[2]] = np.nan
    backend = MegatronBackend(spec, rank=rank, world_size=dist.get_world_size())
    try:
        backend.train(replace(batch, rollout_logprobs=logprobs), [plan(batch, cut(shares))])
    except WorkerError as error:
        return str(error)
    finally:
        backend.close()
    return "no error"


def layer_passes(path: str, config: MegatronConfig, *, rank: int) -> int:
    """Forward passes of the first layer of this rank in a training step, those that recompute it included."""
    backend = MegatronBackend(megatron_spec(path, config), rank=rank, world_size=dist.get_world_size())
    layer = next(module for _, module in backend.policy.model.named_modules() if isinstance(module, TransformerLayer))
    passes: list[bool] = []
    layer.register_forward_hook(lambda *_: passes.append(True))
    train(backend, BATCHES[0], data_ranks(config))
    backend.close()
    return len(passes)


def continue_difference(spec: TrainerSpec, folder: Path, *, rank: int) -> float:
    """Largest difference of weights when another parallel layout continues from a checkpoint."""
    backend = MegatronBackend(spec, rank=rank, world_size=dist.get_world_size())
    backend.load(folder)
    train(backend, BATCHES[SAVED_AFTER], data_ranks(spec.megatron))
    expected, found = load_file(folder / "final.safetensors"), weights_of(backend)
    backend.close()
    return max(float((weight - expected[name]).abs().max()) for name, weight in found.items())


def main(rank: int, port: int, models: Sequence[str], folder: Path, kind: str) -> None:
    num_ranks, is_slow = int(kind[0]), kind.endswith("slow")
    join_world(rank, num_ranks, "127.0.0.1", port, "gloo", 60.0)
    expected: dict[int, TrainingRun] = {}
    report: dict[str, Any] = {"modes": {}, "resumed": {}, "roles": {}, "resharded": {}, "distilled": {}}
    if num_ranks == 1:
        saved = [each for each in folder.iterdir() if each.name in RESUMED]
        folder = folder / "alone"
        folder.mkdir()
        specs = {each: megatron_spec(models[MODES[each.name].model], MegatronConfig()) for each in saved}
        report["alone"] = {each.name: continue_difference(spec, each, rank=rank) for each, spec in specs.items()}
    for name, mode in MODES.items():
        if mode.num_ranks != num_ranks or mode.is_slow != is_slow:
            continue
        path, config = models[mode.model], mode.config
        if mode.model not in expected:
            backend: TrainBackend = FsdpBackend(full_spec(path), rank=rank, world_size=num_ranks)
            expected[mode.model] = TrainingRun.from_backend(backend, num_data_ranks=num_ranks)
        spec = megatron_spec(path, config, qkv_format=QkvFormat.bshd if mode.is_padded else QkvFormat.thd)
        ours = MegatronBackend(spec, rank=rank, world_size=num_ranks)
        run = TrainingRun.from_backend(ours, num_data_ranks=data_ranks(config), by_tokens=mode.is_dynamic)
        report["modes"][name] = difference(run, expected[mode.model])
        ours.close()
        if name in (*RESUMED, *MORE_RESHARDED):
            report["resumed"][name] = resumed(spec, folder / name, rank=rank)
        if name == "tp2, latent":
            report["moved bias"] = moved_bias(path, config, rank=rank)
        if name == "tp2":
            report["kl to itself"] = kl_to_saved(spec, folder / name, rank=rank)
        if name == "pp2, recomputed in part":
            whole = replace(config, core_args={})
            plain = replace(whole, recompute_granularity=None)
            report["layer passes"] = [layer_passes(path, each, rank=rank) for each in (plain, config, whole)]
        if name == "pp2":
            # An exported model of an earlier mode: other weights, same shapes.
            report["passes"] = all_scoring_passes(spec, str(folder / "tp2" / "hf"), rank=rank)
            no_kl = replace(spec, algo=AlgoConfig(use_rollout_logprobs=True), ref_path=None)
            report["nan"] = nan_on_last_rank(no_kl, rank=rank)
    for name, other in (MORE_RESHARDED if is_slow else RESHARDED).items() if num_ranks == 2 else ():
        spec = megatron_spec(models[MODES[name].model], MODES[other].config)
        report["resharded"][name] = continue_difference(spec, folder / name, rank=rank)
    if num_ranks > 1:
        report["replays"] = compare_replays(models[1], REPLAYS[num_ranks, is_slow], rank=rank)
    if num_ranks == 2 and is_slow:
        report["latent replays"] = compare_replays(models[4], LATENT_REPLAYS, rank=rank)
    for name, kinds in DISTILLED.items() if num_ranks == 2 and not is_slow else ():
        config = MODES[name].config
        spec = megatron_roles.all_roles_spec(models[0], models[2], config)
        report["distilled"][name] = megatron_roles.larger_teacher_difference(
            spec, models[3], rank=rank, num_data_ranks=data_ranks(config), kinds=kinds
        )
    for name in MORE_ROLES if is_slow else ROLES:
        mode = MODES[name]
        if mode.num_ranks == num_ranks:
            other, larger = (models[1], models[1]) if mode.has_experts else (models[2], models[3])
            path, into = models[mode.has_experts], folder / f"{name} roles"
            report["roles"][name] = roles(mode, path, other, into, rank=rank, larger=larger)
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:8], Path(sys.argv[8]), sys.argv[9])
    # The reports are on disk. Threads of torch.distributed sometimes abort an interpreter that shuts down.
    os._exit(0)
