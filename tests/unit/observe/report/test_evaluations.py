"""Section of the page about evaluations."""

from pathlib import Path

import pytest

from rlscale.errors import DataError
from rlscale.observe.evaluation_files import REGRADE, EvaluationFiles, Measured
from rlscale.observe.evaluation_table import COLUMNS, plain_table
from rlscale.observe.report import read_run, render
from rlscale.observe.report.evaluations import MAX_CHARS, MAX_PROMPTS, MAX_SAMPLES, render_evaluations
from tests.unit.observe.report.made_evaluation import METRICS, made_group, write_evaluations
from tests.unit.observe.report.made_run import make_run


def test_the_page_has_a_table_of_all_and_samples_of_the_newest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_evaluations(run, 0, 7)
    (run / "evaluations" / "v00000007").rename(run / "evaluations" / f"v00000007{REGRADE}")
    write_evaluations(run, 7)
    html = render_evaluations(run)
    assert html.count("<td>0.250 to 0.750</td>") == 3 and html.count("math, graded again") == 1
    assert "Samples of version 7" in html and f"{MAX_PROMPTS} of 30 prompts" in html and "@2 0.625" in html
    rows = [int(part.split(":")[0]) for part in html.split("<summary>row ")[1:]]
    assert rows == sorted(rows) and len(rows) == MAX_PROMPTS
    page = render(read_run(run, max_samples=1))
    assert html in page and 'href="#evaluations"' in page


def test_the_span_of_versions_is_shown(tmp_path: Path) -> None:
    group = made_group(0)
    group.samples[0].append([6, 7], logprobs=[0.0, 0.0], weight_versions=[8, 9])
    writer = EvaluationFiles(tmp_path, keep_last=None, resume_at=99).open(Measured.of_run(7, 7), {"a": {}})
    assert writer is not None
    writer.add("a", group)
    writer.commit({**METRICS, "eval/a/num_prompts": 1.0, "eval/a/version_min": 7.0, "eval/a/version_max": 9.0})
    html = render_evaluations(tmp_path)
    assert "<td>7 to 9</td>" in html and "3 tokens, versions 7, 8, 9" in html and "1 tokens<" in html


def test_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    write_evaluations(tmp_path, 1)
    html = render_evaluations(tmp_path)
    assert "<script" not in html and "<img" not in html and "&lt;script&gt;" in html


def test_long_texts_and_large_groups_are_cut(tmp_path: Path) -> None:
    write_evaluations(tmp_path, 1, num_prompts=1, num_samples=MAX_SAMPLES + 3, text="x" * (MAX_CHARS + 9))
    html = render_evaluations(tmp_path)
    assert "3 more samples in the file" in html and "(9 more characters)" in html


def test_a_run_without_evaluations_has_no_section(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert render_evaluations(run) == "" and "#evaluations" not in render(read_run(run, max_samples=1))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    write_evaluations(tmp_path, 1, num_prompts=1)
    (tmp_path / "evaluations" / "v00000001" / "0_a.jsonl").write_text("{\n")
    with pytest.raises(DataError, match=r"0_a\.jsonl must hold the samples of an evaluation"):
        render_evaluations(tmp_path)


def test_the_table_in_plain_text() -> None:
    title, row = plain_table(METRICS, {"a": {}})
    assert title.split("  ")[0] == COLUMNS[0]
    assert "0.250 to 0.750" in row and "12.5%" in row and "@2 0.625" in row and " - " in row
