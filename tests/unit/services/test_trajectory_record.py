"""Submissions that cannot be trained on: one line says which field of which trajectory is wrong."""

import json
from typing import Any

import pytest

from rlscale.services.trajectory_record import SubmissionError, parse_submission
from tests.buffer_process import trajectory


def refusal(body: Any) -> str:
    with pytest.raises(SubmissionError) as caught:
        parse_submission(body if isinstance(body, bytes) else json.dumps(body).encode())
    return str(caught.value)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in trajectory("a", "g").items() if key != name}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body must be JSON, got EOF while parsing an object at line 1 column 1"),
        (b"\xff\xfe", "the body must be JSON, got expected value at line 1 column 1"),
        (b"[" * 100_000, "the body must be JSON, got recursion limit exceeded at line 1 column 202"),
        ([], "the list must have at least one trajectory, got none"),
        ([3], "[0] must be an object, got 3"),
        (without("logprobs"), "logprobs must be given"),
        (trajectory("a", "g", logprobs=None), "logprobs must be a valid array, got None"),
        (trajectory("a", "g", logprobs=[-1.0]), "logprobs must have 3 entries, as many as response_ids, got 1"),
        (trajectory("a", "g", loss_mask=[1]), "loss_mask must have 3 entries, as many as response_ids, got 1"),
        (trajectory("a", "g", logprobs=[-1.0, 0.5, 0]), "logprobs[1] must be less than or equal to 0.001, got 0.5"),
        (trajectory("a", "g", weight_versions="7"), "weight_versions must be a valid integer, got '7'"),
        (trajectory("a", "g", response_ids=[3, True, 5]), "response_ids[1] must be a valid integer, got True"),
        (trajectory("a", "g", response_ids=[3, -1, 5]), "response_ids[1] must be greater than or equal to 0, got -1"),
        (trajectory("a", "g", reward="1"), "reward must be a valid number, got '1'"),
        (trajectory("a", "g", reward=float("nan")), "reward must be a finite number, got nan"),
        (trajectory("a", "g", messages=[]), "messages is no field of a trajectory; move it into metadata"),
        ([trajectory("a", "g"), trajectory("b", "g", id="")], "[1].id must have at least 1 character, got ''"),
        (
            trajectory("a", "g", loss_mask=[0, 0, 0]),
            "response_ids must have a trainable token; send status failed instead",
        ),
        (
            trajectory("a", "g", metadata={"rewards": {}}),
            "metadata must not have the key rewards, which the run sets; rename it",
        ),
    ],
)
def test_a_refusal_names_the_field(body: Any, message: str) -> None:
    assert refusal(body) == message


def test_a_failure_has_a_cause_and_no_reward() -> None:
    failure = {"cause": "tool", "message": "timeout"}
    failed = {"status": "failed", "reward": None, "failure": failure}
    (record,) = parse_submission(json.dumps(trajectory("a", "g", **failed)).encode())
    assert record.failure is not None and record.failure.cause == "tool"
    assert refusal(trajectory("a", "g", **failed | {"failure": None})).startswith("failure must be an object")
    assert refusal(trajectory("a", "g", **failed | {"reward": 0.0})) == "reward must be null with status failed, got 0"
    graded = failed | {"failure": failure | {"cause": "policy"}}
    assert refusal(trajectory("a", "g", **graded)).startswith("failure.cause must be a cause without a reward")
    assert refusal(trajectory("a", "g", reward=None)).startswith("reward must be a number with status completed")
