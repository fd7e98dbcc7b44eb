"""Check of torch_memory_saver: the memory of a trainer is freed while it is paused, and unchanged afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

from rlscale.cluster.memory_saver_env import SAVER, saver_variables
from rlscale.config import TrainBackendName
from rlscale.config.installed import is_installed
from rlscale.doctor.catalog import CheckContext
from rlscale.doctor.check_result import CheckResult, SkipCheck, parse_result, worst
from rlscale.doctor.saver_probe import build_saver_spec
from rlscale.doctor.tiny_training import build_tiny_model

FIELDS = {
    "num_layers": 12,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


def memory_saver(context: CheckContext) -> CheckResult:
    """Runs the probe in processes that start with the saver's library preloaded, as a trainer does.

    One for each backend: Megatron-core uses the saver, too, and could leave it in another mode.
    """
    if not is_installed(SAVER):
        raise SkipCheck(f"{SAVER} is not installed; pip install 'rlscale[gpu]', or cluster.offload_train_mode=move")
    model = build_tiny_model(context.models, **FIELDS)
    backends = [TrainBackendName.fsdp]
    if is_installed("megatron.core"):
        backends.append(TrainBackendName.megatron)
    # One after the other: they measure the free memory of the device.
    results = {backend: _probe(context, model, backend) for backend in backends}
    return CheckResult(
        verdict=worst(result.verdict for result in results.values()),
        summary="; ".join(f"{backend}: {result.summary}" for backend, result in results.items()),
        figures=tuple(
            replace(figure, name=f"{backend}: {figure.name}")
            for backend, result in results.items()
            for figure in result.figures
        ),
    )


def _probe(context: CheckContext, model: str, backend: TrainBackendName) -> CheckResult:
    path = context.folder / f"{backend}.json"
    subprocess.run(
        [sys.executable, "-P", "-m", "rlscale.doctor.saver_probe", model, backend, str(path)],
        env={**os.environ, **saver_variables(build_saver_spec(model, backend))},
        check=True,
    )
    return parse_result(json.loads(path.read_text(encoding="utf-8")))
