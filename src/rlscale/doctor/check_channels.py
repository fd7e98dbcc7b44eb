"""Checks of the weight channels: a push to an embedded engine, verified by checksums, and its rate."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlscale.config import WeightChannelName
from rlscale.doctor.catalog import CheckContext
from rlscale.doctor.check_result import CheckResult, CheckVerdict, Figure
from rlscale.doctor.rates import measure_copy
from rlscale.doctor.tiny_engine import ask, embedded_launch, running_engine
from rlscale.doctor.tiny_training import build_tiny_model, world_of_one
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.types import EngineAddress
from rlscale.weights.channel_spec import ChannelSpec
from rlscale.weights.factory import make_channel

GB = 1e9
TIMEOUT_S = 30.0
BUCKET_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
LAYERS = {"cpu": 4, "cuda": 12}
WIDTH = {"cpu": 256, "cuda": 1024}
CHANGED_SHARE = 0.01
"""Share of the values that change between two versions: what a delta is for."""


def process_group(context: CheckContext) -> CheckResult:
    """NCCL between two GPUs; gloo where there is one GPU, which NCCL refuses to share, or none."""
    num_gpus = torch.cuda.device_count() if context.device == "cuda" else 0
    if num_gpus < 2:
        reason = "; one GPU, on which NCCL refuses two processes: NCCL was not measured" if num_gpus else ""
        return _check_channel(context, WeightChannelName.process_group, backend="gloo", note=f"over gloo{reason}")
    torch.cuda.init()  # type: ignore[no-untyped-call]  # before the variable changes: this process keeps all of its GPUs
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[1]
    return _check_channel(context, WeightChannelName.process_group, backend="nccl", note="over NCCL, GPU 0 to GPU 1")


def shared_memory(context: CheckContext) -> CheckResult:
    """CUDA IPC between two processes on one GPU; the ring in shared memory on a CPU."""
    note = "by CUDA IPC on one GPU" if context.device == "cuda" else "through a ring in shared memory"
    return _check_channel(context, WeightChannelName.shared_memory, backend="gloo", note=note)


def disk(context: CheckContext) -> CheckResult:
    """Full folders of safetensors files."""
    return _check_channel(
        context, WeightChannelName.disk, backend="gloo", note="through the folder for temporary files"
    )


def delta(context: CheckContext) -> CheckResult:
    """A folder of which only changes are written."""
    note = f"{CHANGED_SHARE:.0%} of the values changed"
    return _check_channel(context, WeightChannelName.delta, backend="gloo", note=note)


def _check_channel(context: CheckContext, name: WeightChannelName, *, backend: str, note: str) -> CheckResult:
    device = context.device
    width = WIDTH[device]
    model = build_tiny_model(
        context.models,
        num_layers=LAYERS[device],
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
    )
    # Shards of the model stay on the device, as those of a trainer.
    weights = {k: t.to(device, torch.bfloat16) for k, t in load_file(f"{model}/model.safetensors").items()}
    spec = ChannelSpec(
        name=name,
        backend=backend,
        device=device,
        bucket_bytes=BUCKET_BYTES[device],
        timeout_s=TIMEOUT_S,
        folder=context.folder / "weights",
        model_folder=context.folder / "unused",
    )
    launch = embedded_launch(model, device=device, dtype="bfloat16", num_slots=1)
    with world_of_one(device), running_engine(launch, context.folder) as address:
        seconds, sent = _push_twice(spec, weights, address)
        version = ask(address, lambda engine: engine.weight_version())
    num_bytes = sum(weight.nbytes for weight in weights.values())
    rate, copy = num_bytes / seconds, measure_copy(device)
    figures = (
        Figure(name="model", value=num_bytes / GB, unit="GB"),
        Figure(name="sent", value=sent / GB, unit="GB"),
        Figure(name="push", value=seconds, unit="s"),
        Figure(name="rate", value=rate / GB, unit="GB/s"),
        Figure(name="of a device copy", value=100 * rate / copy, unit="%"),
    )
    if version != 2:
        text = f"the engine must hold version 2 after two pushes, got {version}"
        return CheckResult(verdict=CheckVerdict.failed, summary=text, figures=figures)
    return CheckResult(
        verdict=CheckVerdict.ok,
        summary=f"{note}: every tensor arrived with its checksum",
        figures=figures,
    )


def _push_twice(spec: ChannelSpec, weights: dict[str, Tensor], address: EngineAddress) -> tuple[float, int]:
    """Seconds and bytes of the second push; the first one opens connections and allocates memory."""
    channel = make_channel(spec, make_engine=lambda each: HttpEngine(each, timeout_s=TIMEOUT_S), rank=0)
    channel.connect([address])
    try:
        channel.push(_iterate(weights), 1)
        for weight in weights.values():
            flat = weight.view(-1)
            flat[: max(1, int(flat.numel() * CHANGED_SHARE))] += 1.0
        report = channel.push(_iterate(weights), 2)
    finally:
        channel.close()
    return report.seconds, report.num_bytes


def _iterate(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from weights.items()
