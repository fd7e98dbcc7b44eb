"""Result files and plot of a sweep."""

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from rlscale.config.hydra.sweep import Direction, JobRecord, SweepResult
from rlscale.observe.sweep_plot import build_figure, draw_sweep
from rlscale.observe.sweep_results import closing_lines, make_table, write_sweep


def make_result(folder: Path, *, direction: Direction = Direction.maximize) -> SweepResult:
    objectives = [0.1, 0.4, None, 0.3]
    jobs = [
        JobRecord(
            index=i,
            overrides=("experiment=quickstart", f"optim.lr={10.0 ** -(i + 2)}", f"algo={'gspo' if i % 2 else 'grpo'}"),
            seconds=1.5,
            run_dir=f"runs/{i}",
            objective=objective,
            error=None if objective is not None else "RuntimeError: engine 0 died\nat line 3",
        )
        for i, objective in enumerate(objectives)
    ]
    return SweepResult(folder=folder, jobs=tuple(jobs), direction=direction)


@pytest.mark.slow
def test_the_table_has_a_column_for_each_swept_key_and_a_row_for_each_job(tmp_path: Path) -> None:
    result = make_result(tmp_path / "new")
    table, plot = write_sweep(result)
    rows = list(csv.reader(table.open(newline="")))
    assert rows[0] == ["job", "optim.lr", "algo", "objective", "seconds", "run_dir", "error"]
    assert rows[2] == ["2", "0.001", "gspo", "0.4", "1.5", "runs/1", ""]
    assert rows[3] == ["3", "0.0001", "grpo", "", "1.5", "runs/2", "RuntimeError: engine 0 died"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_printed_table_marks_the_best_job(tmp_path: Path) -> None:
    shown = io.StringIO()
    Console(width=120, file=shown).print(make_table(make_result(Path("sweeps/[dim]a"))))
    text = shown.getvalue()
    assert text.startswith("4 jobs, sweeps/[dim]a ")
    assert "* 0.4" in text and "failed" in text and "engine 0 died" in text
    assert closing_lines(make_result(tmp_path), [])[0] == "best: job 2, objective 0.4  optim.lr=0.001 algo=gspo"
    worst = closing_lines(make_result(tmp_path, direction=Direction.minimize), [])[0]
    assert worst.startswith("best: job 1, objective 0.1")


def test_long_numbers_are_rounded_on_the_console_only(tmp_path: Path) -> None:
    overrides = ("optim.lr=0.0001575132049977", "model.hf_checkpoint=/models/long/enough")
    jobs = tuple(
        JobRecord(index=i, overrides=(override,), seconds=0.0, run_dir="", objective=1.0)
        for i, override in enumerate(overrides)
    )
    result = SweepResult(folder=tmp_path, jobs=jobs)
    assert closing_lines(result, [])[0].endswith("optim.lr=0.0001575 model.hf_checkpoint=")
    table, _ = write_sweep(result)
    assert "0.0001575132049977" in table.read_text() and "/models/long/enough" in table.read_text()


def test_a_sweep_without_objective_has_no_plot(tmp_path: Path) -> None:
    jobs = (JobRecord(index=0, overrides=("a=1",), seconds=0.0, run_dir="", error="gone"),)
    assert [file.name for file in write_sweep(SweepResult(folder=tmp_path, jobs=jobs))] == ["results.csv"]


def test_a_single_job_is_drawn_by_its_number(tmp_path: Path) -> None:
    jobs = (JobRecord(index=0, overrides=("a=1",), seconds=0.0, run_dir="", objective=0.5),)
    draw_sweep(SweepResult(folder=tmp_path, jobs=jobs), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_the_legend_lists_the_drawn_elements(tmp_path: Path) -> None:
    whole = make_result(tmp_path)
    without_failures = SweepResult(folder=tmp_path, jobs=tuple(job for job in whole.jobs if job.error is None))
    for result, expected in (
        (whole, {"job", "best job", "failed job", "mean"}),
        (without_failures, {"job", "best job", "mean"}),
    ):
        (legend,) = build_figure(result).legends
        assert {text.get_text() for text in legend.get_texts()} == expected
