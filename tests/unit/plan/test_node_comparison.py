"""Differences between nodes: which break a run, and the table that shows them."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlscale.plan.node_comparison import find_problems, find_warnings
from rlscale.plan.node_facts import CheckedFolder, FixedPort, FolderUse, NodeFacts, node_table

GIB = 2**30
VERSIONS = {"Python": "3.11.7", "torch": "2.13.0", "transformers": "5.0", "Ray": "2.60.0", "rlscale": "0.1 (aa)"}
HEAD = NodeFacts(
    host="head",
    address="10.0.0.1",
    interface="eth0",
    interfaces=("lo", "eth0", "eth1"),
    chosen_interfaces={},
    versions=VERSIONS,
    folders={"run.dir": "token", "model.hf_checkpoint": "config.json 10"},
    free_memory_bytes=64 * GIB,
    free_disk_bytes=100 * GIB,
    clock_error_s=0.002,
)
OTHER = replace(HEAD, host="other", address="10.0.0.2", interfaces=("lo", "ens3"), interface="ens3")
FOLDERS = (
    CheckedFolder(key="run.dir", path=Path("/runs/a"), use=FolderUse.shared, expected="token"),
    CheckedFolder(key="model.hf_checkpoint", path=Path("/models/m"), use=FolderUse.same, expected="config.json 10"),
)


def problems_of(node: NodeFacts) -> list[str]:
    return [str(problem) for problem in find_problems([HEAD, node], FOLDERS)]


def with_version(name: str, version: str | None) -> NodeFacts:
    return replace(OTHER, versions={**VERSIONS, name: version})


def test_equal_nodes_have_no_problem() -> None:
    assert problems_of(OTHER) == []
    assert find_warnings([HEAD, OTHER]) == []


@pytest.mark.parametrize(("package", "version"), [("torch", "2.11.0"), ("Ray", "2.50.0"), ("rlscale", "0.1 (bb)")])
def test_another_version_breaks_the_run(package: str, version: str) -> None:
    (problem,) = problems_of(with_version(package, version))
    assert (
        f"cluster must have the same version of {package} on every node, got {version} on other (10.0.0.2)" in problem
    )


def test_a_missing_package_is_named() -> None:
    (problem,) = problems_of(with_version("torch", None))
    assert "got none on other (10.0.0.2) and 2.13.0 on head (10.0.0.1)" in problem


def test_python_must_agree_up_to_its_minor_version() -> None:
    assert problems_of(with_version("Python", "3.11.9")) == []
    assert find_warnings([HEAD, with_version("Python", "3.11.9")]) == [
        "other (10.0.0.2) has Python 3.11.9, and head (10.0.0.1) has 3.11.7"
    ]
    assert len(problems_of(with_version("Python", "3.12.1"))) == 1


def test_other_packages_are_warnings() -> None:
    node = with_version("transformers", "5.1")
    assert problems_of(node) == []
    assert find_warnings([HEAD, node]) == ["other (10.0.0.2) has transformers 5.1, and head (10.0.0.1) has 5.0"]


def test_a_folder_that_is_not_shared_is_named_with_its_node() -> None:
    (problem,) = problems_of(replace(OTHER, folders={**HEAD.folders, "run.dir": None}))
    assert problem == (
        "run.dir must be on a file system that all nodes share, got /runs/a, whose files other (10.0.0.2) does not "
        "see; choose a folder of a shared file system"
    )


@pytest.mark.parametrize(
    ("found", "message"),
    [(None, "/models/m, which other (10.0.0.2) does not have"), ("config.json 9", "which differs on other (10.0.0.2)")],
)
def test_an_input_may_be_a_copy_but_must_be_the_same(found: str | None, message: str) -> None:
    (problem,) = problems_of(replace(OTHER, folders={**HEAD.folders, "model.hf_checkpoint": found}))
    assert message in problem


@pytest.mark.parametrize(
    ("variable", "value", "is_wrong"),
    [
        ("GLOO_SOCKET_IFNAME", "ens3", False),
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("NCCL_SOCKET_IFNAME", "en", False),
        ("NCCL_SOCKET_IFNAME", "=en", True),
        ("NCCL_SOCKET_IFNAME", "^docker", False),
        ("NCCL_SOCKET_IFNAME", "^docker,virbr", False),
        ("NCCL_SOCKET_IFNAME", "eth,ens", False),
        ("NCCL_SOCKET_IFNAME", "=eth0,ens3", False),
        ("NCCL_SOCKET_IFNAME", "=eth0,ens", True),
        ("NCCL_SOCKET_IFNAME", "ens3:4000", False),
        ("GLOO_SOCKET_IFNAME", "eth0,ens3", True),
    ],
)
def test_interfaces_must_exist_on_every_node(variable: str, value: str, is_wrong: bool) -> None:
    problems = problems_of(replace(OTHER, chosen_interfaces={variable: value}))
    assert bool(problems) == is_wrong
    if is_wrong:
        assert f"train.env_vars.{variable} must name an interface of every node, got {value}" in problems[0]
        assert "other (10.0.0.2) has lo, ens3" in problems[0]


def test_nodes_that_cannot_connect_are_both_named() -> None:
    (problem,) = problems_of(replace(OTHER, unreachable=("head (10.0.0.1) at port 20000: timed out",)))
    assert "other (10.0.0.2), which cannot connect to head (10.0.0.1) at port 20000: timed out" in problem


def test_clock_memory_and_disk_are_warnings() -> None:
    node = replace(OTHER, clock_ahead_s=-5.0, free_memory_bytes=8 * GIB, free_disk_bytes=GIB // 2)
    assert problems_of(node) == []
    clock, memory, disk = find_warnings([HEAD, node])
    assert "the clock of other (10.0.0.2) differs by -5.0 s" in clock
    assert memory == "other (10.0.0.2) has 8.0 GiB of free memory, another node 64.0"
    assert disk == "other (10.0.0.2) has 0.50 GiB of free disk for the run folder"


def test_a_clock_within_the_error_of_its_measurement_is_not_reported() -> None:
    assert find_warnings([HEAD, replace(OTHER, clock_ahead_s=3.0, clock_error_s=2.5)]) == []


def test_a_port_of_the_config_that_is_in_use_breaks_the_run() -> None:
    (problem,) = problems_of(replace(OTHER, taken_ports=(FixedPort(key="sglang.grpc_port", port=50051),)))
    assert problem == (
        "sglang.grpc_port must be free on the nodes that use it, got 50051, which is in use on other (10.0.0.2); "
        "choose another port, or end the program that listens there"
    )


def test_the_table_has_a_row_for_each_node() -> None:
    header, head, other = node_table([HEAD, replace(OTHER, clock_ahead_s=0.25)], FOLDERS)
    assert header.split() == [
        *("node", "address", "interface", "Python", "torch", "transformers", "Ray", "rlscale"),
        *("paths", "ports", "clock", "free", "memory", "free", "disk"),
    ]
    assert head.split()[:4] == ["head", "10.0.0.1", "eth0", "3.11.7"]
    assert head.split()[9:12] == ["same", "free", "same"]
    assert "+0.250 s" in other
    assert other.endswith("100.0 GiB")


def test_the_table_names_paths_and_ports_of_a_node_that_are_wrong() -> None:
    found = {"run.dir": None, "model.hf_checkpoint": "config.json 9"}
    node = replace(OTHER, folders=found, taken_ports=(FixedPort(key="gateway.port", port=8000),), unreachable=("head",))
    _, head, other = node_table([HEAD, node], FOLDERS)
    assert "  run.dir, model.hf_checkpoint  gateway.port in use, unreachable  same  " in other
    assert head.split()[9:11] == ["same", "free"]
