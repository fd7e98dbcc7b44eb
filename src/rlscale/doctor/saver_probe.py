"""The process of the check of torch_memory_saver.

python -P -m rlscale.doctor.saver_probe <model folder> <backend> <file for the result>
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rlscale.config import ComputeDtype, ModelConfig, OffloadMode, TrainBackendName
from rlscale.doctor.check_result import CheckResult, CheckVerdict, Figure
from rlscale.doctor.tiny_training import RAGGED, build_random_batch, build_spec, plan_one_step, world_of_one
from rlscale.training.registry import make_backend
from rlscale.training.roles import TrainerRank
from rlscale.training.spec import OffloadSpec, TrainerSpec
from rlscale.weights.transports.cuda_ipc import export_handle

GB = 1e9
MIN_FREED = 0.8
"""Least share of the allocated memory that must be free while the trainer is paused."""


def build_saver_spec(model_path: str, backend: TrainBackendName) -> TrainerSpec:
    """A trainer whose memory the saver pauses."""
    spec = build_spec(model_path, device="cuda", dtype=ComputeDtype.bfloat16, backend=backend)
    model = ModelConfig(use_hf_config_for_megatron=True)
    return replace(spec, model=model, offload=OffloadSpec(mode=OffloadMode.tms))


def main(argv: Sequence[str]) -> int:
    """Trains, pauses and trains again. Returns 0; the verdict is in the file."""
    batch = build_random_batch(RAGGED, vocab_size=101)
    plans = plan_one_step(batch, max_tokens=1000)
    with world_of_one("cuda"):
        backend = make_backend(build_saver_spec(argv[0], TrainBackendName(argv[1])), rank=0, world_size=1)
        backend.train(batch, plans)  # ends paused: training offloads all models
        paused = torch.cuda.mem_get_info()[0]
        before = _weights(backend)
        resumed, allocated = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        backend.offload()
        with backend.exporting():
            # What the channel shared_memory does while the saver is active.
            export_handle(torch.ones(1 << 20, dtype=torch.uint8, device="cuda"))
        after = _weights(backend)
        loss = backend.train(batch, plans).steps[0]["loss"]
    same = all(torch.equal(weight, after[name]) for name, weight in before.items())
    freed = paused - resumed
    is_right = same and math.isfinite(loss) and freed >= MIN_FREED * allocated
    result = CheckResult(
        verdict=CheckVerdict.ok if is_right else CheckVerdict.failed,
        summary=f"weights {'are the same' if same else 'have changed'} after a pause, which freed {freed / GB:.2f} GB",
        figures=(
            Figure(name="allocated", value=allocated / GB, unit="GB"),
            Figure(name="freed by a pause", value=freed / GB, unit="GB"),
        ),
    )
    Path(argv[2]).write_text(json.dumps(result.to_json(), allow_nan=False), encoding="utf-8")
    return 0


def _weights(backend: TrainerRank) -> dict[str, Tensor]:
    return {name: weight.cpu() for name, weight in backend.weights()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
