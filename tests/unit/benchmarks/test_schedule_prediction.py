"""Stored results of the benchmark of rollout schedules."""

from pathlib import Path


def test_a_case_keeps_the_date_of_its_measurement(tmp_path: Path) -> None:
    from schedule_prediction import RESULTS, read, write

    stored = read(RESULTS / "schedule_prediction.json")
    stored["groups of 4"]["machine"] = stored["groups of 4"]["machine"] | {"date": "2001-02-03"}
    file = tmp_path / "results.json"
    write(file, stored, [])
    assert read(file) == stored
    page = file.with_suffix(".md").read_text()
    assert page.count("2001-02-03") == 1
    assert stored["groups of 1"]["machine"]["date"] in page
