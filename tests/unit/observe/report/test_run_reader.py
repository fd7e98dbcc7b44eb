"""Reading of finished, running, interrupted and invalid run folders."""

import json
from pathlib import Path

import pytest

from rlscale.errors import ConfigError, DataError
from rlscale.observe.report import read_run
from tests.unit.observe.report.made_run import make_run


def test_a_finished_run_is_read_completely(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path), max_samples=1000)
    assert run.result is not None and run.result["final_eval"] == 0.9
    assert len(run.metrics) == 13 and len(run.distributions) == 12
    assert len(run.samples) == run.num_samples == 48
    assert run.launches[0]["overrides"][0] == "algo.eps_clip=0.1"


def test_samples_are_thinned_evenly_over_the_run(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path), max_samples=12)
    assert [sample["step"] for sample in run.samples] == list(range(12))
    assert run.num_samples == 48
    assert read_run(tmp_path, max_samples=0).samples == []


def test_an_incomplete_last_line_of_a_running_run_is_skipped(tmp_path: Path) -> None:
    make_run(tmp_path, finished=False)
    for name in ("metrics.jsonl", "samples.jsonl", "distributions.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 12, "ha')
    run = read_run(tmp_path, max_samples=1000)
    assert run.result is None
    assert (len(run.metrics), len(run.samples), len(run.distributions)) == (13, 48, 12)


def test_a_run_without_metrics_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: a}\n")
    run = read_run(tmp_path, max_samples=10)
    assert (run.metrics, run.samples, run.distributions, run.launches, run.result) == ([], [], [], [], None)


def test_errors_name_the_right_folder_to_pass(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run must be a run folder, got .*nowhere, which does not exist; "):
        read_run(tmp_path / "nowhere", max_samples=1)
    with pytest.raises(ConfigError, match=r"pass a folder with config\.yaml"):
        read_run(tmp_path, max_samples=1)
    make_run(tmp_path / "runs" / "one", num_rollouts=1)
    with pytest.raises(ConfigError, match="pass one of its runs: one"):
        read_run(tmp_path / "runs", max_samples=1)


def test_the_error_names_file_and_row(tmp_path: Path) -> None:
    make_run(tmp_path, num_rollouts=2)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    (tmp_path / "samples.jsonl").write_text("\n".join([lines[0], "{", *lines[1:]]) + "\n")
    with pytest.raises(DataError, match=r"samples\.jsonl, row 2 must be JSON"):
        read_run(tmp_path, max_samples=1000)
    (tmp_path / "finished.json").write_text("{")
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(DataError, match=r"finished\.json must be JSON"):
        read_run(tmp_path, max_samples=1000)


def test_only_selected_lines_are_parsed(tmp_path: Path) -> None:
    make_run(tmp_path, num_rollouts=4)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    lines[1] = "not read"
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(tmp_path, max_samples=4)
    assert [json.loads(lines[4 * i])["index"] for i in range(4)] == [sample["index"] for sample in run.samples]


def test_long_samples_are_thinned_by_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    size = (tmp_path / "samples.jsonl").stat().st_size
    monkeypatch.setattr("rlscale.observe.report.run_reader.MAX_SAMPLE_BYTES", size // 4 + 1)
    assert len(read_run(tmp_path, max_samples=1000).samples) == 12
    assert len(read_run(tmp_path, max_samples=5).samples) == 5
