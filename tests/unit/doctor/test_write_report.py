"""The report: a stable JSON schema and a page of Markdown."""

import json
from pathlib import Path

import pytest

from rlscale.doctor.catalog import Check
from rlscale.doctor.check_result import CheckResult, CheckVerdict, Figure
from rlscale.doctor.run_checks import CheckOutcome
from rlscale.doctor.write_report import DoctorReport, to_json, to_markdown, write_report


def outcome(name: str, verdict: CheckVerdict, *, output: tuple[str, ...] = ()) -> CheckOutcome:
    check = Check(name=name, title=f"The {name}", target="m:f", deadline_s=8, advice="none")
    figures = (Figure(name="rate", value=1234.56789, unit="GB/s"), Figure(name="torch", value="2.13.0"))
    result = CheckResult(
        verdict=verdict, summary="a | b", figures=figures, next_step="" if verdict == "ok" else "do it"
    )
    return CheckOutcome(check=check, result=result, seconds=1.234, output=output)


REPORT = DoctorReport(
    device="cpu",
    outcomes=(outcome("torch", CheckVerdict.ok), outcome("lora", CheckVerdict.timed_out, output=("line 1", "line 2"))),
    load=0.25,
    note="Nothing else ran.",
)


def test_the_schema_of_the_json_is_stable() -> None:
    content = to_json(REPORT)
    assert list(content) == ["format", "date", "device", "note", "load_average", "machine", "counts", "checks"]
    assert list(content["machine"]) == ["cpu", "cores", "python", "packages"]
    assert content["format"] == 1 and content["counts"] == {"ok": 1, "timed_out": 1}
    assert content["checks"][1] == {
        "name": "lora",
        "title": "The lora",
        "deadline_s": 8,
        "seconds": 1.23,
        "verdict": "timed_out",
        "summary": "a | b",
        "figures": [
            {"name": "rate", "value": 1234.56789, "unit": "GB/s"},
            {"name": "torch", "value": "2.13.0", "unit": ""},
        ],
        "next_step": "do it",
        "output": ["line 1", "line 2"],
    }


PAGE = """\
# rlscale-doctor on `cpu`

2026-11-23, A CPU, 2 cores, Python 3.11.7, torch 2.13.0, ray 2.60.0. Load average at the start: 0.2.
Nothing else ran.

1 ok, 1 timed out.

| check | verdict | s | result | figures | next step |
|---|---|---|---|---|---|
| torch | ok | 1.2 | a / b | rate 1235 GB/s; torch 2.13.0 |  |
| lora | timed out | 1.2 | a / b | rate 1235 GB/s; torch 2.13.0 | do it |

## Last lines of `lora`

```text
line 1
line 2
```
"""


def test_the_page_is_stable() -> None:
    machine = {"cpu": "A CPU", "cores": 2, "python": "3.11.7", "packages": {"torch": "2.13.0", "ray": "2.60.0"}}
    assert to_markdown(to_json(REPORT) | {"date": "2026-11-23", "machine": machine}) == PAGE


def test_both_files_are_written_and_agree(tmp_path: Path) -> None:
    path = write_report(REPORT, tmp_path / "new" / "folder")
    assert path.name == "doctor_cpu.md"
    assert to_markdown(json.loads(path.with_suffix(".json").read_text())) == path.read_text()


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (CheckVerdict.ok, 0),
        (CheckVerdict.warning, 0),
        (CheckVerdict.skipped, 0),
        (CheckVerdict.failed, 1),
        (CheckVerdict.timed_out, 1),
    ],
)
def test_the_exit_code_is_1_when_a_check_failed(verdict: CheckVerdict, code: int) -> None:
    outcomes = (outcome("a", CheckVerdict.ok), outcome("b", verdict))
    assert DoctorReport(device="cpu", outcomes=outcomes, load=0.0).exit_code == code
