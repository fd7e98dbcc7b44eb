"""The file of SkyPilot. Its own parser reads it in tests/cluster/test_skypilot_parser.py (nightly)."""

import pytest
import yaml

from rlscale.launch.node_needs import NodeNeeds
from rlscale.launch.options import SkyPilotOptions
from rlscale.launch.skypilot import check_skypilot, secret_flags, write_skypilot
from tests.unit.launch.jobs import NEEDS, make_job

ONE_NODE = NodeNeeds(num_nodes=1, gpus=4, cpus=36, memory_gib=128, is_whole=False, slots=4)


def test_gpus_are_requested_by_name_and_number() -> None:
    options = SkyPilotOptions(volume="v", hardware="a100", spot=True, infra="aws/us-east-1", disk=500)
    task = yaml.safe_load(write_skypilot(make_job(), options))
    assert task["num_nodes"] == 2
    assert task["resources"] == {
        "accelerators": "A100-80GB:8",
        "infra": "aws/us-east-1",
        "disk_size": 500,
        "use_spot": True,
    }
    assert task["volumes"] == {"/rlscale": "v"}


def test_a_run_on_cpus_asks_for_cpus_and_memory() -> None:
    needs = NodeNeeds(num_nodes=1, gpus=0, cpus=2, memory_gib=4, is_whole=False, slots=2)
    task = yaml.safe_load(write_skypilot(make_job(needs=needs), SkyPilotOptions(bucket="s3://b")))
    assert task["resources"] == {"cpus": "2+", "memory": "4+"}
    assert task["file_mounts"] == {"/rlscale": {"source": "s3://b", "mode": "MOUNT_CACHED"}}


def test_secrets_are_names_only() -> None:
    job = make_job(env=("WANDB_API_KEY",))
    task = yaml.safe_load(write_skypilot(job, SkyPilotOptions(volume="v")))
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None, "WANDB_API_KEY": None}
    assert secret_flags(job) == ["--secret", "RAY_AUTH_TOKEN", "--secret", "WANDB_API_KEY"]


def test_without_an_image_rlscale_is_installed_with_its_constraints() -> None:
    task = yaml.safe_load(write_skypilot(make_job(), SkyPilotOptions(volume="v", workdir=".", setup=["echo hi"])))
    assert task["setup"] == "set -e\npip install --constraint constraints.txt .\necho hi\n"
    with_image = SkyPilotOptions(volume="v", image="docker:r/i:cuda")
    task = yaml.safe_load(write_skypilot(make_job(), with_image))
    assert "setup" not in task and task["resources"]["image_id"] == "docker:r/i:cuda"


@pytest.mark.parametrize(
    ("options", "needs", "paths"),
    [
        (SkyPilotOptions(), ONE_NODE, ["--bucket or --volume"]),
        (SkyPilotOptions(bucket="s3://b", volume="v"), ONE_NODE, ["--bucket or --volume"]),
        (SkyPilotOptions(bucket="s3://b"), NEEDS, ["--bucket"]),
        (SkyPilotOptions(bucket="s3://b"), ONE_NODE, []),
        (SkyPilotOptions(volume="v"), NEEDS, []),
    ],
)
def test_run_folders_need_a_place_that_all_nodes_share(
    options: SkyPilotOptions, needs: NodeNeeds, paths: list[str]
) -> None:
    assert [problem.path for problem in check_skypilot(make_job(needs=needs), options)] == paths
