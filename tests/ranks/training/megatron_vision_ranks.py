"""Program of the two ranks of `test_megatron_vision.py`, which compares models with images with transformers.

python -m tests.ranks.training.megatron_vision_ranks <rank> <port> <folder of the models> <folder for reports> <case>...
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor

from rlscale.architectures.family import find_family
from rlscale.config import MegatronConfig, ModelBuild, ModelConfig
from rlscale.models.hf_models import load_causal_lm
from rlscale.models.image_processor import load_image_processor
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.megatron.backend import MegatronBackend
from rlscale.training.megatron.hf_mapping.export_hf import export_hf
from rlscale.training.megatron.hf_mapping.load_hf import HfCheckpoint, load_hf
from rlscale.training.megatron.model.cpu_patches import megatron_device
from rlscale.training.megatron.model.megatron_model import MegatronDecoder, build_model, configure_pipeline
from rlscale.training.megatron.model.model_inputs import pack_samples
from rlscale.training.megatron.model.output_head import OutputHead
from rlscale.training.megatron.model.vision import TOWER
from rlscale.training.megatron.optim import wrap_chunks
from rlscale.training.megatron.parallel_dims import build_parallel_dims
from rlscale.training.megatron.rank import packing_options
from rlscale.training.megatron.step import forward_backward
from rlscale.training.packing.microbatch import Microbatch
from rlscale.training.spec import TrainerSpec
from rlscale.types import TrainBatch
from tests.ranks.training.fsdp_ranks import full_spec
from tests.ranks.training.megatron_model_ranks import CP, PP, SP, TP, conversion_round_trips, round_trips
from tests.ranks.training.megatron_vision_roles import adapter_folder, adapters, critic_difference, muon_difference
from tests.unit.training.fsdp.test_vision import image_batch, samples
from tests.unit.training.rollouts import plan, spec

QWEN2_5, QWEN3 = ModelBuild.tiny_qwen2_5_vl, ModelBuild.tiny_qwen3_vl
SAMPLES = [[0, 2], [3], [4, 5], []]
"""Micro-batches; transformers refuses the placeholder that sample 1 has generated."""


@dataclass(frozen=True, kw_only=True)
class VisionCase:
    """A parallel layout of one model."""

    build: ModelBuild = QWEN3
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> MegatronConfig:
        return MegatronConfig(**self.sizes)


INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2}
RECOMPUTED = {"recompute_granularity": "full"}
CASES = {
    "dp2": VisionCase(),
    "tp2": VisionCase(sizes={TP: 2}),
    "tp2 sp": VisionCase(sizes={TP: 2, "core_args": SP}),
    "pp2": VisionCase(sizes={PP: 2}),
    "tp2, recomputed": VisionCase(sizes={TP: 2, **RECOMPUTED}),
    "tp2 sp, recomputed": VisionCase(sizes={TP: 2, "core_args": SP, **RECOMPUTED}),
    "qwen2_5_vl tp2": VisionCase(build=QWEN2_5, sizes={TP: 2}),
    "qwen2_5_vl tp2 sp": VisionCase(build=QWEN2_5, sizes={TP: 2, "core_args": SP}),
    "cp2": VisionCase(sizes={CP: 2}),
    "qwen2_5_vl cp2, recomputed": VisionCase(build=QWEN2_5, sizes={CP: 2, **RECOMPUTED}),
    "qwen2_5_vl pp2, recomputed": VisionCase(build=QWEN2_5, sizes={PP: 2, **RECOMPUTED}),
    "qwen2_5_vl pp2, interleaved": VisionCase(build=QWEN2_5, sizes={PP: 2, "core_args": INTERLEAVED}),
    "dp2, attention recomputed": VisionCase(sizes={"recompute_granularity": "selective"}),
    "pp2, layout": VisionCase(sizes={PP: 2, "core_args": {"pipeline_model_parallel_layout": "Ettt|tL"}}),
    "pp2, one length": VisionCase(sizes={PP: 2, "variable_seq_lengths": False, "seq_length": 96}),
}
TRAINED = {"tp2": (), "tp2 sp": (), "pp2": ("vision",)}
"""Case -> parts that are frozen in a run that is saved and resumed."""
CRITICS = ("tp2 sp", "qwen2_5_vl pp2, recomputed")
STEPPED_BY_MUON = ("tp2 sp", "qwen2_5_vl pp2, recomputed")
ADAPTED = ("tp2 sp", "qwen2_5_vl tp2", "qwen2_5_vl pp2, recomputed")


class Parity:
    """Logprobs and gradients of all samples, on this rank's part of a model."""

    def __init__(self, case: VisionCase, path: str) -> None:
        self.path, self.megatron = path, case.config
        self.dims = build_parallel_dims(self.megatron, seed=1)
        config = ModelConfig(use_hf_config_for_megatron=True)
        model = build_model(path, model=config, megatron=self.megatron, dtype=torch.float32)
        self.model = configure_pipeline(model, self.dims)
        load_hf(self.model, path)
        self.head = OutputHead.from_model(self.model, spec(path), dims=self.dims)
        self.worst, self.num_tokens = 0.0, 0

    def compare(self) -> dict[str, Any]:
        """Largest differences of logprobs, and of gradients relative to the largest entry of the tensor."""
        batch, (expected, grads) = read_batch(self.path), reference(self.path)
        chunks = wrap_chunks(self.model, is_sharded=False)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        cpu, processor = torch.device("cpu"), load_image_processor(self.path)
        options = packing_options(self.megatron, self.dims, device=cpu, processor=processor)
        own = SAMPLES[self.dims.data_index :: self.dims.data_group.size()]
        least = 96 if not self.model.config.variable_seq_lengths else 0
        micros = [pack_samples(batch, each, options=options, num_positions=least) for each in own]
        total = sum(map(len, expected.values()))

        def loss(micro: Microbatch, hidden: Tensor, decoder: MegatronDecoder) -> Tensor:
            found, _ = self.head.logprobs_and_entropy(hidden, decoder.head_weight, micro=micro, entropy_grad=False)
            if micro.layout.mask_T.any():  # an empty micro-batch has one masked entry
                wanted = torch.cat([expected[i] for i in micro.sample_indices.tolist()])
                self.worst = max(self.worst, (found.detach() - wanted).abs().max().item())
                self.num_tokens += len(wanted)
            return (found * micro.layout.mask_T).sum() / total

        forward_backward(chunks, micros, loss=loss)
        with torch.no_grad():
            for _, parameter in self.model.named_parameters():
                parameter.copy_(parameter.main_grad)
        copies = self.copies_of_the_tower_agree()
        worst, names = {}, set()
        for name, grad in export_hf(self.model):
            worst[name] = ((grad - grads[name]).abs().max() / grads[name].abs().max().clamp(min=1e-3)).item()
            names.add(name)
        assert names == (grads.keys() if dist.get_rank() == 0 else set())
        most = max(worst.values(), default=0.0)
        return {"logprobs": self.worst, "tokens": self.num_tokens, "grads": most, "copies": copies}

    def copies_of_the_tower_agree(self) -> bool:
        """Whether all tensor-parallel ranks have the same bits; a collective."""
        own = [parameter.detach() for name, parameter in self.model.named_parameters() if name.startswith(TOWER)]
        found: list[list[Tensor]] = [[]] * self.dims.tensor_size
        dist.all_gather_object(found, own, group=self.dims.tensor_group)
        return all(torch.equal(a, b) for copies in zip(*found, strict=True) for a, b in pairwise(copies))


@cache
def read_batch(path: str) -> TrainBatch:
    return image_batch(load_image_processor(path))


@cache
def reference(path: str) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Logprobs of the trainable tokens of each sample in transformers' own forward, and the gradient of their mean."""
    model, processor, batch = load_causal_lm(path, dtype=torch.float32), load_image_processor(path), read_batch(path)
    found: dict[int, Tensor] = {}
    for i in (i for each in SAMPLES for i in each):
        ids, images = samples(processor)[i]
        row = torch.tensor(ids)[None]
        given: dict[str, Any] = {}
        if images:
            given["pixel_values"] = torch.from_numpy(np.concatenate([processor.pixels(image) for image in images]))
            given["image_grid_thw"] = torch.tensor([image.grid for image in images])
            given["mm_token_type_ids"] = (row == processor.layout.image_token).int()
        trainable = torch.from_numpy(np.flatnonzero(batch.loss_mask[batch.offsets[i] : batch.offsets[i + 1]]))
        logits = model(input_ids=row, use_cache=False, **given).logits[0, trainable - 1]
        found[i] = logits.log_softmax(-1).gather(1, row[0, trainable, None])[:, 0]
    joined = torch.cat(list(found.values()))
    (joined.sum() / len(joined)).backward()
    vision = find_family(model.config.model_type).vision
    assert vision is not None, "the models of this test read images"
    in_memory = {name: parameter.grad for name, parameter in model.named_parameters()}
    grads = {name: in_memory[vision.in_memory(name)] for name in HfCheckpoint(path).files}
    assert all(grad is not None for grad in grads.values()) and len(grads) == len(in_memory)
    return {i: each.detach() for i, each in found.items()}, grads


def resumed(case: VisionCase, path: str, frozen: Sequence[str], folder: Path, *, rank: int) -> dict[str, bool]:
    """Whether a run continues bitwise from its checkpoint, and its exported folder has its weights."""
    config, batch = ModelConfig(use_hf_config_for_megatron=True), read_batch(path)
    made: TrainerSpec = full_spec(path, megatron=case.config, model=config, freeze_params=list(frozen) or None)
    steps = [plan(batch, [SAMPLES])]

    def step(backend: MegatronBackend) -> tuple[dict[str, float], dict[str, Tensor]]:
        metrics = backend.train(batch, steps).steps[0]
        return dict(metrics), {name: weight.clone() for name, weight in backend.weights()}

    first = MegatronBackend(made, rank=rank, world_size=2)
    start = {name: weight.clone() for name, weight in first.weights()}
    step(first)
    if rank == 0:
        folder.mkdir()
    dist.barrier()
    first.save(folder)
    numbers, weights = step(first)
    first.export_hf(folder / "hf")
    first.close()
    second = MegatronBackend(made, rank=rank, world_size=2)
    second.load(folder)
    again, same = step(second)
    second.close()
    changed = {name for name in weights if not torch.equal(weights[name], start[name])}
    towers = {name for name in weights if "visual." in name and "merger" not in name}
    exported = load_file(folder / "hf" / "model.safetensors") if rank == 0 else {}
    assert rank or load_image_processor(str(folder / "hf")).layout == load_image_processor(path).layout
    return {
        "numbers": numbers == again and numbers["grad_norm"] > 0 and numbers["kl_loss"] > 0,
        "weights": all(torch.equal(same[name], weight) for name, weight in weights.items()),
        "frozen": changed == weights.keys() - (towers if frozen else set()),
        "exported": all(torch.equal(exported[name], weight) for name, weight in weights.items()),
    }


def main(rank: int, port: int, root: Path, folder: Path, names: Sequence[str]) -> None:
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    report: dict[str, Any] = {}
    for name in names:
        case = CASES[name]
        path = str(root / case.build)
        with megatron_device():
            parity = Parity(case, path)
            report[name] = {"round trip": round_trips(parity.model, path), **parity.compare()}
            parallel_state.destroy_model_parallel()
        if name in TRAINED:
            report[name]["resumed"] = resumed(case, path, TRAINED[name], folder / name, rank=rank)
        if name in CRITICS:
            report[name]["critic"] = critic_difference(path, case.config, read_batch(path), SAMPLES, rank=rank)
        if name in STEPPED_BY_MUON:
            report[name]["muon"] = muon_difference(path, case.config, read_batch(path), SAMPLES, rank=rank)
        if name in ADAPTED:
            where = adapter_folder(folder, name)
            report[name]["adapters"] = adapters(path, case.config, read_batch(path), SAMPLES, where, rank=rank)
    with megatron_device():
        report["converted"] = {
            str(build): conversion_round_trips(str(build), root, folder)
            for build in dict.fromkeys(CASES[name].build for name in names)
        }
    for build in report["converted"]:
        back, source = (load_image_processor(str(each)) for each in (folder / f"{build}-back", root / build))
        assert back.layout == source.layout, "a converted folder has the files of its image processor"
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
    # The reports are on disk. Threads of torch.distributed sometimes abort an interpreter that shuts down.
    os._exit(0)
