"""The commands that `rlscale-train` suggests after a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.cli.train import next_commands
from rlscale.config import load_config


def proposed(*words: str) -> list[str]:
    result: Any = SimpleNamespace(run_dir=Path("runs/mine"), hf_folder=None)
    return [command for command, _ in next_commands(load_config(words), result)]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("experiment=quickstart", "run.name=mine"),
        ("logging.wandb.key=secret",),
        ("train.env_vars={HF_TOKEN: secret, N: 1}",),
    ],
)
def test_names_and_secrets_of_this_run_are_skipped(words: tuple[str, ...]) -> None:
    assert proposed(*words)[1] == "rlscale-train algo=rloo"


def test_the_experiment_is_kept() -> None:
    report, other, sweep = proposed("experiment=quickstart_warmup", "optim.lr=1e-3")
    assert report == "rlscale-report runs/mine"
    assert other == "rlscale-train experiment=quickstart_warmup optim.lr=1e-3 algo=sft_per_token"
    assert sweep == "rlscale-train experiment=quickstart_warmup -m optim.lr=0.0005,0.001,0.002"


def test_the_algorithm_is_chosen_once() -> None:
    assert proposed("algo=dapo", "data.num_rollout=8")[1] == "rlscale-train data.num_rollout=8 algo=rloo"
    assert proposed("+algo=dapo")[1] == "rlscale-train algo=rloo"
    assert proposed("algo=rloo")[1] == "rlscale-train algo=grpo"


def test_a_run_that_does_not_train_suggests_no_algorithm() -> None:
    assert proposed("debug.rollout_only=true") == ["rlscale-report runs/mine"]


def test_slimes_modules_are_kept() -> None:
    commands = proposed("run.slime_modules=true", "run.dir=runs/mine")
    assert commands[1] == "rlscale-train run.slime_modules=true algo=rloo"
