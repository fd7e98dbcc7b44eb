"""The batch script of Slurm: its directives, and what must not be in it. It runs for real in tests/cluster."""

import pytest

from rlscale.launch.node_needs import NodeNeeds
from rlscale.launch.options import SlurmOptions
from rlscale.launch.slurm import check_slurm, write_slurm
from tests.unit.launch.jobs import make_job

OPTIONS = SlurmOptions(workdir="/shared/my work")


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_whole_nodes_are_taken_with_their_memory() -> None:
    assert directives(write_slurm(make_job(), OPTIONS)) == [
        "--job-name=rlscale-test",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=68",
        "--gpus-per-node=8",
        "--exclusive",
        "--mem=0",
        "--signal=B:USR1@600",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
        '--chdir="/shared/my work"',
    ]


def test_memory_that_is_asked_for_is_that_of_whole_nodes_too() -> None:
    found = directives(write_slurm(make_job(), SlurmOptions(workdir="/w", memory=512)))
    assert "--mem=512G" in found and "--exclusive" in found and "--mem=0" not in found


def test_a_part_of_a_node_is_requested_by_size() -> None:
    needs = NodeNeeds(num_nodes=1, gpus=0, cpus=2, memory_gib=4, is_whole=False, slots=2)
    found = directives(write_slurm(make_job(needs=needs), OPTIONS))
    assert "--mem=4G" in found and "--cpus-per-task=2" in found
    assert not any("gpus" in line or "exclusive" in line for line in found)


def test_given_options_become_directives() -> None:
    options = SlurmOptions(
        workdir="/w", partition="gpu", account="a", qos="high", constraint="h100&ib", time="2:00:00", save_before=60
    )
    found = directives(write_slurm(make_job(), options))
    for line in ("--partition=gpu", "--account=a", "--qos=high", "--constraint=h100&ib", "--time=2:00:00"):
        assert line in found
    assert "--signal=B:USR1@60" in found


@pytest.mark.parametrize("survives", [True, False])
def test_the_loss_of_a_node_ends_the_job_unless_the_run_survives_it(survives: bool) -> None:
    text = write_slurm(make_job(restarts_nodes=survives), OPTIONS)
    assert ("--no-kill" in directives(text)) == survives
    assert ("--kill-on-bad-exit" in text) != survives


def test_variables_are_required_by_name_and_the_token_is_made_in_the_job() -> None:
    text = write_slurm(make_job(env=("WANDB_API_KEY",)), OPTIONS)
    assert ': "${WANDB_API_KEY:?the job needs this environment variable' in text
    assert "secrets.token_hex" in text and "RAY_AUTH_MODE=token" in text


def test_setup_lines_image_and_interface_are_used() -> None:
    setup = ["module load cuda", "source /v/bin/activate"]
    options = SlurmOptions(workdir="/w", setup=setup, image="/i.sif", interface="ib0")
    text = write_slurm(make_job(), options)
    assert "module load cuda\nsource /v/bin/activate\n" in text
    assert "in_image=(apptainer exec --nv --bind /w /i.sif)" in text
    assert "interface=ib0" in text


@pytest.mark.parametrize(
    ("time", "limit_s"),
    [("5", 300), ("5:30", 330), ("1:00:00", 3600), ("1-2", 93600), ("1-2:03", 93780), ("1-2:03:04", 93784)],
)
def test_a_job_that_would_requeue_itself_at_once_is_refused(time: str, limit_s: int) -> None:
    assert check_slurm(SlurmOptions(time=time, save_before=limit_s - 1)) == []
    (problem,) = check_slurm(SlurmOptions(time=time, save_before=limit_s))
    assert problem.path == "--time" and problem.value == f"{time}, {limit_s} seconds"


def test_a_job_without_a_limit_is_not_refused() -> None:
    assert check_slurm(SlurmOptions()) == check_slurm(SlurmOptions(time="0")) == []
