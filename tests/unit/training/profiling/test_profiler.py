"""Profiles of rollouts and reports of ranks that run out of memory."""

import gzip
import json
import threading
import time
from pathlib import Path

import pytest
import torch

from rlscale.config import DebugConfig
from rlscale.errors import WorkerError
from rlscale.training.profiling.profiler import RankProfiler, build_memory_report
from rlscale.training.spec import ProfilerSpec


def profiler(folder: Path) -> RankProfiler:
    spec = ProfilerSpec(profile_rollouts=(3,), profile_folder=folder / "profile", memory_folder=folder / "memory")
    return RankProfiler(spec, rank=1)


def test_selected_rollouts_write_a_profile_with_operators_and_allocations(tmp_path: Path) -> None:
    profiled = profiler(tmp_path)
    for rollout_id in (2, 3, 4):
        with profiled.profile_rollout(rollout_id):
            product = torch.ones(30, 30) @ torch.ones(30, 30)
    assert float(product[0, 0]) == 30
    names = {path.name for path in (tmp_path / "profile").iterdir()}
    assert names == {"rollout_3_rank_1.json.gz", "rollout_3_rank_1.txt"}
    with gzip.open(tmp_path / "profile" / "rollout_3_rank_1.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {"aten::mm", "[memory]"} <= {event.get("name") for event in events}
    assert "aten::mm" in (tmp_path / "profile" / "rollout_3_rank_1.txt").read_text()


@pytest.mark.slow
def test_a_rank_out_of_memory_lists_its_tensors(tmp_path: Path) -> None:
    held = torch.zeros(1234, 77)
    message = r"actor rank 1: RuntimeError: .*can't allocate memory"
    with pytest.raises(WorkerError, match=message) as caught, profiler(tmp_path).report_oom():
        torch.empty(2**55)
    path = tmp_path / "memory" / "memory_rank_1.json"
    assert str(path) in str(caught.value)
    report = json.loads(path.read_text())
    (line,) = [each for each in report["tensors"] if each["shape"] == [1234, 77]]
    assert line == {"bytes": held.nbytes, "number": 1, "device": "cpu", "dtype": "float32", "shape": [1234, 77]}
    assert report["tensor_bytes"] >= held.nbytes
    assert report["largest_resident_bytes"] > 2**20


def test_another_error_is_not_changed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), profiler(tmp_path).report_oom():
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not (tmp_path / "memory").exists()


@pytest.mark.slow
def test_views_of_one_tensor_count_once() -> None:
    whole = torch.zeros(4321, 5)
    parts = [whole[:4000], whole.T]
    lines = [each for each in build_memory_report()["tensors"] if each["bytes"] == whole.nbytes]
    assert len(parts) == 2 and sum(line["number"] for line in lines) == 1


def test_config_keys_select_folders_and_rollouts(tmp_path: Path) -> None:
    plain = ProfilerSpec.from_config(DebugConfig(), run_folder=tmp_path)
    assert plain == ProfilerSpec(
        profile_folder=tmp_path / "profile",
        memory_folder=Path.cwd(),
        request_file=tmp_path / "snapshot_memory",
    )
    debug = DebugConfig(profile_rollouts=[0, 5], profile_dir="p", memory_snapshot_dir="m")
    configured = ProfilerSpec.from_config(debug, run_folder=tmp_path)
    assert configured.profile_rollouts == (0, 5)
    assert (configured.profile_folder, configured.memory_folder) == (Path("p").absolute(), Path("m").absolute())


@pytest.mark.slow
def test_a_touched_file_requests_a_report(tmp_path: Path) -> None:
    request = tmp_path / "snapshot_memory"
    spec = ProfilerSpec(memory_folder=tmp_path / "memory", request_file=request)
    rank = RankProfiler(spec, rank=1)
    held = torch.zeros(1234, 79)
    request.touch()
    # The rank is busy: the report does not wait for it.
    deadline = time.monotonic() + 60
    while not (found := list((tmp_path / "memory").glob("memory_*_rank_1.json"))) and time.monotonic() < deadline:
        torch.ones(200, 200) @ torch.ones(200, 200)
    rank.close()
    report = json.loads(found[0].read_text())
    assert [1234, 79] in [each["shape"] for each in report["tensors"]] and held.shape == (1234, 79)
    assert report["objects"] and report["resident_bytes"] > 2**20


def test_a_profiler_without_a_request_file_has_no_thread(tmp_path: Path) -> None:
    profiler(tmp_path).close()
    assert not [thread for thread in threading.enumerate() if thread.name == "memory requests"]
