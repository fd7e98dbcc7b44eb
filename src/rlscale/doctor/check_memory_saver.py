"""Check of torch_memory_saver: the memory of a trainer is freed while it is paused, and unchanged afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

from rlscale.cluster.memory_saver_env import SAVER, saver_variables
from rlscale.doctor.catalog import CheckContext
from rlscale.doctor.check_result import CheckResult, SkipCheck, parse_result
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
    """Runs the probe in a process that starts with the saver's library preloaded, as a trainer does."""
    if find_spec(SAVER) is None:
        raise SkipCheck(f"{SAVER} is not installed; pip install 'rlscale[gpu]', or cluster.offload_train_mode=move")
    model, path = build_tiny_model(context.folder, **FIELDS), context.folder / "probe.json"
    subprocess.run(
        [sys.executable, "-P", "-m", "rlscale.doctor.saver_probe", model, str(path)],
        env={**os.environ, **saver_variables(build_saver_spec(model))},
        check=True,
    )
    return parse_result(json.loads(path.read_text(encoding="utf-8")))
