"""Checks of the uncut run before its rehearsal. They query the interpreter of SGLang, which is a process."""

from pathlib import Path

import pytest

from rlscale.config import RunConfig, load_config
from rlscale.errors import ConfigError
from rlscale.rehearsal.cut_layout import read_sizes
from rlscale.rehearsal.first_checks import check_launch
from rlscale.rehearsal.rehearsal import Rehearsal
from tests.recipes import AGENT_EXAMPLES, RUNNABLE


def loaded(experiment: str, *given: str, overlay: str = "rehearsal") -> RunConfig:
    return load_config([f"experiment={experiment}", f"on={overlay}", *given])


def test_missing_checkpoints_are_generated_and_listed() -> None:
    found = dict(check_launch(loaded("qwen3_4b_ppo", "model.ref_load=/no/such/reference")))
    assert found["model.hf_checkpoint=Qwen/Qwen3-4B"] == "the random model"
    assert any(name.startswith("model.ref_load") for name in found)


def test_a_broken_file_stops_the_rehearsal_as_it_stops_the_run(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    with pytest.raises(ConfigError, match=r"model\.hf_checkpoint must be a Hugging Face checkpoint"):
        check_launch(loaded("qwen3_4b_grpo", f"model.hf_checkpoint={broken}"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "data.prompt_data=gone.csv",
            r"data\.prompt_data must end in \.jsonl, \.jsonl\.gz or \.parquet, got gone\.csv; convert it",
        ),
        (
            "eval.prompt_data=[a,gone.txt]",
            r"eval\.prompt_data must end in \.jsonl, \.jsonl\.gz or \.parquet, got gone\.txt",
        ),
        ("eval.config=gone.yaml", r"eval\.config must "),
    ],
)
def test_a_file_that_cannot_be_generated_stops_the_rehearsal(given: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_launch(loaded("qwen3_4b_grpo", given))


def test_functions_of_the_user_are_imported_first() -> None:
    with pytest.raises(ConfigError, match=r"reward\.custom_path"):
        check_launch(loaded("qwen3_4b_grpo", "reward.custom_path=no_such_module:reward"))


def test_external_engines_are_refused_by_name() -> None:
    given = ("rollout=external", "rollout.external_engine_addrs=[localhost:1]", "cluster.colocate=false")
    with pytest.raises(ConfigError, match=r"rollout\.engine must be sglang or embedded"):
        check_launch(loaded("qwen3_4b_grpo", *given))


@pytest.mark.parametrize(
    ("experiment", "overlay"),
    [*((name, "rehearsal") for name in RUNNABLE), *((name, "[qwen3_4b,rehearsal]") for name in AGENT_EXAMPLES)],
)
def test_a_recipe_becomes_a_config_for_the_cpu(experiment: str, overlay: str, tmp_path: Path) -> None:
    config = loaded(experiment, f"run.dir={tmp_path / 'out'}", overlay=overlay)
    stage = Rehearsal(config)._prepare(check_launch(config))
    found = stage.config
    assert found.cluster.device == "cpu" and found.data.num_rollout == 2 and not found.run.rehearsal
    assert read_sizes(found) == stage.sizes
    assert Path(found.run.dir or "") == tmp_path / "out" / "run"
    assert found.model.hf_checkpoint == str(tmp_path / "out" / "model")
    # No file of the real run may be written or read.
    assert found.checkpoint.save == str(tmp_path / "out" / "run" / "checkpoints")
    assert found.checkpoint.load is None and found.critic.load in (None, found.model.hf_checkpoint)
    assert (found.algo.advantage_estimator, found.optim.name) == (config.algo.advantage_estimator, config.optim.name)
