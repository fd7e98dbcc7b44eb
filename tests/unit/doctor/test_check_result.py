"""Results cross to the parent as JSON, and nothing else is accepted."""

import json
from typing import Any

import pytest

from rlscale.doctor.check_result import CheckResult, CheckVerdict, Figure, parse_result

FULL = CheckResult(
    verdict=CheckVerdict.warning,
    summary="slow",
    figures=(Figure(name="rate", value=1.5, unit="GB/s"), Figure(name="torch", value="2.13")),
    next_step="buy a GPU",
)


def test_a_result_survives_json() -> None:
    assert parse_result(json.loads(json.dumps(FULL.to_json(), allow_nan=False))) == FULL


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "great"},
        {"verdict": None},
        {"summary": 3},
        {"next_step": None},
        {"figures": None},
        {"figures": [{"name": "a", "value": None, "unit": ""}]},
        {"figures": [{"name": "a"}]},
        {"figures": ["a"]},
        {"other": 1},
    ],
)
def test_other_content_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        parse_result(FULL.to_json() | change)
    with pytest.raises(ValueError, match="must be a JSON object, got list"):
        parse_result([1])
