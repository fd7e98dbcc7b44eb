"""Program of the two ranks of `test_megatron_model.py`.

python -m tests.ranks.training.megatron_model_ranks <rank> <port> <folder of the models> <folder for reports>
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlscale.algo.linear_logprobs import HeadOptions, logprobs_from_hidden
from rlscale.config import AlgoConfig, MegatronConfig, ModelConfig
from rlscale.config.groups.megatron import RopeType
from rlscale.config.groups.model import MegatronToHf
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.megatron.backend import MegatronBackend
from rlscale.training.megatron.checkpoint.convert_weights import convert_to_hf, convert_to_megatron, stored_dtype
from rlscale.training.megatron.hf_mapping.export_hf import Exporter, export_hf
from rlscale.training.megatron.hf_mapping.load_hf import HfCheckpoint, load_hf
from rlscale.training.megatron.model.attention import PackedSamples, zigzag_positions
from rlscale.training.megatron.model.cpu_patches import megatron_device
from rlscale.training.megatron.model.megatron_model import MegatronDecoder, MegatronModel, build_model
from rlscale.training.megatron.parallel_dims import ParallelDims, build_parallel_dims
from rlscale.training.modules.vocab_parallel import make_vocab_shard
from rlscale.training.spec import WeightOwners
from tests.ranks.training.megatron_families import CONFIGS
from tests.ranks.training.megatron_ranks import megatron_spec

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
SP = {"sequence_parallel": True}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("qwen3", {TP: 2}),
    "tp2, tied": ("qwen3_tied", {TP: 2}),
    "tp2 sp": ("qwen3", {TP: 2, "core_args": SP}),
    "pp2": ("qwen3", {PP: 2}),
    "pp2, tied": ("qwen3_tied", {PP: 2}),
    "vpp2": ("qwen3_deep", {PP: 2, "core_args": {"virtual_pipeline_model_parallel_size": 2}}),
    "cp2": ("qwen3", {CP: 2}),
    "cp2, rows": ("qwen3", {CP: 2}),
    "dp2, rows": ("qwen3", {}),
    "tp2 sp, recomputed": ("qwen3", {TP: 2, "recompute_granularity": "full", "core_args": SP}),
    "tp2, attention recomputed": ("qwen3", {TP: 2, "recompute_granularity": "selective"}),
    "ep2": ("qwen3_moe", {EP: 2}),
    "ep2, a dense layer": ("qwen3_moe_mixed", {EP: 2}),
    "tp2 sp etp2": ("qwen3_moe", {TP: 2, "core_args": {**SP, ETP: 2}}),
    "tp2 sp ep2": ("qwen3_moe", {TP: 2, EP: 2, "core_args": {**SP, ETP: 1}}),
    "pp2, experts": ("qwen3_moe", {PP: 2}),
    "tp2 sp, a key head for two": ("qwen3_one_key", {TP: 2, "core_args": SP}),
    "tp2, qwen2": ("qwen2", {TP: 2}),
    "tp2, llama": ("llama", {TP: 2}),
    "tp2, yarn": ("qwen3_yarn", {TP: 2, "rope_type": RopeType.yarn, "max_position_embeddings": 32}),
    "tp2 sp etp2, deepseek_v3": ("deepseek_v3", {TP: 2, "core_args": {**SP, ETP: 2}}),
    "cp2, deepseek_v3": ("deepseek_v3", {CP: 2}),
    "ep2, plain queries": ("deepseek_v3_plain", {EP: 2}),
    "pp2, kimi_k2": ("kimi_k2", {PP: 2}),
    "tp2 sp, glm4": ("glm4", {TP: 2, "core_args": SP}),
}
BRIDGED_CASES = ("tp2", "pp2, tied", "vpp2", "ep2", "ep2, a dense layer", "tp2 sp etp2", "tp2, qwen2", "tp2, llama")
LENGTHS = ([4, 12, 24], [8, 8, 36])
"""Tokens of the samples of two micro-batches, all divisible by four. In rows all have the length of the longest."""


def make_micro(lengths: list[int], *, seed: int) -> tuple[Tensor, list[int]]:
    """Token ids of concatenated samples, and the lengths of the samples."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 101, (sum(lengths),), generator=generator), lengths


@cache
def reference(path: str, is_row: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logprobs by micro-batch of all tokens but the first of each sample, the gradient of their mean, and buffers."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found, total = [], 0
    for ids, lengths in micros(is_row):
        parts = []
        for sample in ids.split(lengths):
            logits = model(sample[None]).logits[0, :-1]
            parts.append(logits.log_softmax(-1).gather(1, sample[1:, None])[:, 0])
        found.append(torch.cat(parts))
        total += len(found[-1])
    (torch.cat(found).sum() / total).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    # The bias has no gradient. It is exported unchanged, together with the weights.
    grads |= {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    # Under published names, with one tensor per expert.
    return [each.detach() for each in found], revert_weight_conversion(model, grads)


def round_trips(model: MegatronModel, path: str, **options: Any) -> bool:
    """Whether exported weights are bitwise equal to those of the folder that the model has loaded; a collective.

    Args:
        options: keyword arguments of `Exporter`.
    """
    checkpoint = HfCheckpoint(path)
    found = {name: tensor.clone() for name, tensor in Exporter(model, **options).weights()}
    same = all(torch.equal(tensor, checkpoint.tensor(name)) for name, tensor in found.items())
    names: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(names, list(found))
    to = options.get("to", WeightOwners.first)
    if to == WeightOwners.first:
        assert not any(names[1:])
    if to == WeightOwners.every:
        return same and all(sorted(some) == sorted(checkpoint.files) for some in names)
    return same and sorted(name for some in names for name in some) == sorted(checkpoint.files)


def micros(is_row: bool) -> list[tuple[Tensor, list[int]]]:
    lengths = [[max(each)] * 2 for each in LENGTHS] if is_row else [list(each) for each in LENGTHS]
    return [make_micro(each, seed=i) for i, each in enumerate(lengths)]


def bridge_agrees(path: str, sizes: Mapping[str, Any]) -> bool:
    """Whether mbridge loads the same parameters as `load_hf` and exports the weights of the folder bitwise."""
    models = [
        build_model(
            path,
            model=ModelConfig(use_hf_config_for_megatron=True, megatron_to_hf_mode=mode),
            megatron=MegatronConfig(**sizes),
            dtype=torch.float32,
        )
        for mode in MegatronToHf
    ]
    for model in models:
        load_hf(model, path)
    ours, theirs = (dict(model.named_parameters()) for model in models)
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    checkpoint = HfCheckpoint(path)
    found = {name: tensor.clone() for name, tensor in export_hf(models[1])}
    assert found.keys() == (checkpoint.files.keys() if dist.get_rank() == 0 else set())
    return same and all(torch.equal(tensor, checkpoint.tensor(name)) for name, tensor in found.items())


class Case:
    """One parallel layout of one model."""

    def __init__(self, family: str, sizes: Mapping[str, Any], root: Path, *, is_row: bool = False) -> None:
        self.path, self.is_row = str(root / family), is_row
        megatron = MegatronConfig(**sizes)
        self.grid: ParallelDims = build_parallel_dims(megatron, seed=1)
        model = ModelConfig(use_hf_config_for_megatron=True)
        self.model: MegatronModel = build_model(self.path, model=model, megatron=megatron, dtype=torch.float32)
        self.found: dict[int, Tensor] = {}
        self.worst = 0.0

    def export_equals_folder(self) -> bool:
        """Whether exported weights equal those of the folder, for every choice of the ranks that get them."""
        load_hf(self.model, self.path)
        return all(round_trips(self.model, self.path, to=to) for to in WeightOwners)

    def run(self) -> dict[str, float]:
        """Largest differences of logprobs, and of gradients relative to the largest entry of the tensor."""
        config, ddp = self.model.config, DistributedDataParallelConfig(use_distributed_optimizer=False)
        config.calculate_per_token_loss = True
        config.finalize_model_grads_func = finalize_model_grads
        chunks = [DistributedDataParallel(config, ddp, chunk) for chunk in self.model.chunks]
        for chunk in chunks:
            chunk.zero_grad_buffer()
        indices = list(range(2)) if self.grid.data_group.size() == 1 else [self.grid.data_index]
        get_forward_backward_func()(
            forward_step_func=self.step,
            data_iterator=[iter(indices) for _ in chunks],
            model=chunks,
            num_microbatches=len(indices),
            seq_length=36,
            micro_batch_size=1,
            forward_only=False,
        )
        with torch.no_grad():
            for _, parameter in self.model.named_parameters():
                parameter.copy_(parameter.main_grad)
        return {"logprobs": self.worst, "tokens": sum(map(len, self.found.values())), "grads": self.compare()}

    def compare(self) -> float:
        _, expected = reference(self.path, self.is_row)
        worst, names = 0.0, set()
        for name, grad in export_hf(self.model):
            want = expected[name]
            worst = max(worst, ((grad - want).abs().max() / want.abs().max().clamp(min=1e-3)).item())
            names.add(name)
        assert names == (expected.keys() if dist.get_rank() == 0 else set())
        return worst

    def step(self, data: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
        index = next(data)
        ids, lengths = micros(self.is_row)[index]
        context = self.grid.context
        place, size = (0, 1) if context is None else (context.index, context.size)
        starts = np.cumsum(lengths) - np.array(lengths)
        own = [start + zigzag_positions(n, index=place, size=size) for start, n in zip(starts, lengths, strict=True)]
        rows = torch.from_numpy(np.concatenate(own))
        last = torch.from_numpy(np.isin(np.concatenate(own), starts + np.array(lengths) - 1))
        inputs, targets = ids[rows], ids[(rows + 1).clamp(max=len(ids) - 1)]
        packed = PackedSamples.from_lengths(np.array(lengths), context=context, device=torch.device("cpu"))
        if self.is_row:
            shape = (len(lengths), -1)
            output = chunk(inputs.view(shape), torch.zeros_like(inputs).view(shape), None)
        else:
            output = chunk(inputs[None], torch.zeros_like(inputs)[None], None, packed_seq_params=packed)

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            decoder: MegatronDecoder = chunk.module
            group = self.grid.tensor_group
            shard = None if group.size() == 1 else make_vocab_shard(group, first=self.model.first_token)
            weight = decoder.head_weight[: max(101 - self.model.first_token, 0)]
            options = HeadOptions(chunk_tokens=16, shard=shard)
            logprobs, _ = logprobs_from_hidden(hidden.flatten(0, 1), weight, targets_T=targets, options=options)
            expected = torch.zeros(len(ids))
            at = np.delete(np.arange(len(ids)), starts + np.array(lengths) - 1)
            expected[at] = reference(self.path, self.is_row)[0][index]
            self.found[index] = logprobs[~last].detach()
            self.worst = max(self.worst, (self.found[index] - expected[rows][~last]).abs().max().item())
            return (logprobs * ~last).sum(), (~last).sum(), {}

        return output, loss


def main(rank: int, port: int, root: Path, folder: Path) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    report: dict[str, Any] = {}
    with megatron_device():
        for name, (family, sizes) in CASES.items():
            case = Case(family, sizes, root, is_row=name.endswith("rows"))
            report[name] = {"exported": case.export_equals_folder(), **case.run()}
            if name in BRIDGED_CASES:
                report[name]["bridged"] = bridge_agrees(case.path, sizes)
            parallel_state.destroy_model_parallel()
        report["converted"] = {name: conversion_round_trips(name, root, folder) for name in CONFIGS}
        report["megatron-lm"] = read_as_megatron_lm("qwen3", root, folder)
    report["started"] = starts_from(folder / "qwen3-megatron", root / "qwen3", rank=rank)
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    leave_world()


def conversion_round_trips(name: str, root: Path, folder: Path) -> bool:
    """Whether a folder round-trips bitwise: tensor-parallel ranks write torch_dist, other parallel sizes read it."""
    source, megatron, back = root / name, folder / f"{name}-megatron", folder / f"{name}-back"
    written = convert_to_megatron(str(source), megatron, sizes=MegatronConfig(tensor_model_parallel_size=2))
    sizes = {EP: 2, "core_args": {ETP: 1}} if "moe" in name or name in ("deepseek_v3", "gpt_oss") else {PP: 2}
    assert stored_dtype(megatron) == torch.float32
    read = convert_to_hf(megatron, back, model=None, sizes=MegatronConfig(**sizes), dtype=torch.float32)
    before, after = HfCheckpoint(str(source)), HfCheckpoint(str(back))
    assert written.num_tensors == read.num_tensors == len(after.files)
    same = all(torch.equal(before.tensor(each), after.tensor(each)) for each in before.files)
    configs = [(each / "config.json").read_bytes() for each in (source, back)]
    return same and before.files.keys() == after.files.keys() and configs[0] == configs[1]


def read_as_megatron_lm(name: str, root: Path, folder: Path) -> bool:
    """Whether a checkpoint in the folder layout of Megatron-LM is read: iter_<n> and a file with the last one."""
    saved = folder / "megatron-lm"
    if dist.get_rank() == 0:
        shutil.copytree(folder / f"{name}-megatron" / "torch_dist", saved / "iter_0000012")
        (saved / "latest_checkpointed_iteration.txt").write_text("12")
    dist.barrier()
    back = folder / "from-megatron-lm"
    convert_to_hf(saved, back, model=str(root / name), sizes=MegatronConfig(**{TP: 2}), dtype=stored_dtype(saved))
    before, after = HfCheckpoint(str(root / name)), HfCheckpoint(str(back))
    return all(torch.equal(before.tensor(each), after.tensor(each)) for each in before.files)


def starts_from(saved: Path, source: Path, *, rank: int) -> bool:
    """Whether a trainer starts from torch_dist weights. Its Hugging Face folder has no weights."""
    spec = megatron_spec(str(saved / "hf"), MegatronConfig(**{PP: 2}))
    spec = replace(spec, algo=AlgoConfig(use_kl_loss=False), ref_path=None, start_weights=saved)
    backend = MegatronBackend(spec, rank=rank, world_size=2)
    found = {name: weight.clone() for name, weight in backend.weights()}
    backend.close()
    expected = HfCheckpoint(str(source))
    return all(torch.equal(weight, expected.tensor(name)) for name, weight in found.items()) and (
        rank > 0 or found.keys() == expected.files.keys()
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
    # The reports are on disk. Threads of torch.distributed sometimes abort an interpreter that shuts down.
    os._exit(0)
