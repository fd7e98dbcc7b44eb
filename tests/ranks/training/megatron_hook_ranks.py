"""Program of the two ranks of `tests/contract/test_megatron_hooks.py`.

python -m tests.ranks.training.megatron_hook_ranks <rank> <port> <model> <folder with the functions, for reports>
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from megatron.core import parallel_state

from rlscale.config import MegatronConfig
from rlscale.errors import ConfigError
from rlscale.training.distributed import join_world, leave_world
from rlscale.training.megatron.backend import MegatronBackend
from rlscale.training.megatron.hf_mapping.load_hf import HfCheckpoint
from rlscale.training.spec import TrainerSpec
from tests.ranks.training.megatron_ranks import BATCHES, megatron_spec, train

CODE = "recorded_megatron_hooks"
TIMEOUT_MINUTES = 3.5


def spec_with_hooks(model_path: str) -> TrainerSpec:
    config = MegatronConfig(
        pipeline_model_parallel_size=2,
        async_save=True,
        init_hook_path=f"{CODE}:init",
        before_log_prob_hook_path=f"{CODE}:before_logprobs",
        before_train_step_hook_path=f"{CODE}:before_train_step",
    )
    spec = megatron_spec(
        model_path, config, custom={"decay_steps": 10}, reuse_logprobs=False, timeout_minutes=TIMEOUT_MINUTES
    )
    return replace(spec, model=replace(spec.model, custom_model_provider_path=f"{CODE}:provider"))


def no_model_error(spec: TrainerSpec, *, rank: int) -> str:
    """The error for a provider that returns no model."""
    try:
        model = replace(spec.model, custom_model_provider_path=f"{CODE}:no_model")
        MegatronBackend(replace(spec, model=model), rank=rank, world_size=2)
    except ConfigError as error:
        return str(error)
    return ""


def main(rank: int, port: int, model_path: str, folder: Path) -> None:
    sys.path.append(str(folder))
    join_world(rank, 2, "127.0.0.1", port, "gloo", 60.0)
    spec = spec_with_hooks(model_path)
    backend = MegatronBackend(spec, rank=rank, world_size=2)
    for version, batch in enumerate(BATCHES[:2], start=4):
        train(backend, replace(batch, version=version, rollout_id=version), 1)
    before = HfCheckpoint(model_path)
    unchanged = [name for name, weight in backend.weights() if torch.equal(weight, before.tensor(name))]
    calls = list(importlib.import_module(CODE).calls)
    groups = [group for group in parallel_state._global_process_group_list if group is not None]
    async_saver = backend.rank.async_saver
    assert async_saver is not None and parallel_state.get_expert_model_parallel_group() in groups
    timeouts = {each._get_backend(torch.device("cpu")).options._timeout for each in (*groups, async_saver.group)}
    report = {
        "calls": calls,
        "unchanged": unchanged,
        "timeouts": timeouts == {timedelta(minutes=TIMEOUT_MINUTES)},
        "no model": no_model_error(spec, rank=rank),
    }
    (folder / f"report_{rank}.json").write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    # The reports are on disk. Threads of torch.distributed sometimes abort an interpreter that shuts down.
    os._exit(0)
