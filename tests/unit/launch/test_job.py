"""The job that all launchers share: its command, its name, and what it may not contain."""

import pytest

from rlscale.config import load_config
from rlscale.launch.job import (
    absolute_run_dir,
    check_overrides,
    default_name,
    hydra_string,
    one_line,
    variables_of,
)
from tests.unit.launch.jobs import make_job


def test_the_command_keeps_overrides_as_typed_and_fixes_folder_and_address() -> None:
    job = make_job("algo.eps_clip=0.1", "reward.custom_path='a b'", config_dir="/mine")
    assert job.train_command == (
        "rlscale-train", "--config-dir", "/mine",
        "algo.eps_clip=0.1", "reward.custom_path='a b'",
        "run.dir=/shared/runs/test", "cluster.ray_address=auto",
    )  # fmt: skip


@pytest.mark.parametrize("folder", ["/plain/x_1.2", "/with space", "/it's", "/a,b", "/{x}", "/back\\slash'"])
def test_a_run_folder_arrives_through_hydra(folder: str) -> None:
    assert load_config([f"run.dir={hydra_string(folder)}"]).run.dir == folder


def test_the_run_folder_is_absolute_and_the_last_one_wins() -> None:
    config = load_config(["run.dir=mine", "run.dir=/shared/runs/x"])
    assert config.run.dir == "/shared/runs/x"
    assert absolute_run_dir(config, "/home") == "/shared/runs/x"
    assert absolute_run_dir(load_config(["run.dir=mine"]), "/home") == "/home/mine"


def test_names_are_accepted_by_every_scheduler() -> None:
    assert default_name(load_config(["run.name='Mine_1.5 (new)'"])) == "rlscale-mine-1-5-new"
    assert len(default_name(load_config([f"run.name={'long_' * 20}"]))) <= 40


def test_a_comment_stays_one_line() -> None:
    assert one_line("a\nrm -rf /\r\x85b") == "a\\nrm -rf /\\r\\x85b"
    comment = make_job(written_by="x\ny").comment
    assert all(line.startswith("# ") for line in comment.splitlines())


def test_secrets_and_addresses_are_refused_and_never_repeated() -> None:
    problems = check_overrides(
        [
            "logging.wandb.key=s3cret",
            "+train.env_vars={HF_TOKEN: s3cret, OTHER: '${oc.env:OTHER}'}",
            "data.prompt_data=s3://user:s3cret@host/x",
            "cluster.ray_address=1.2.3.4:5",
        ]
    )
    assert [problem.path for problem in problems] == [
        "logging.wandb.key",
        "train.env_vars",
        "data.prompt_data",
        "cluster.ray_address",
    ]
    assert not any("s3cret" in str(problem) for problem in problems)
    assert "'${oc.env:LOGGING_WANDB_KEY}'" in problems[0].fix


def test_references_to_the_environment_are_no_secrets_and_are_required() -> None:
    overrides = ["logging.wandb.key='${oc.env:WANDB_API_KEY}'", "train.env_vars={HF_TOKEN: '${oc.env:HF}'}"]
    assert check_overrides(overrides) == []
    assert check_overrides(["logging.wandb.key=null", "data.input_key=text"]) == []
    assert variables_of([*overrides, overrides[0]]) == ("WANDB_API_KEY", "HF")
