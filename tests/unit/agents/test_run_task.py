from typing import Any

import pytest

from rlscale.agents.run_task import AgentFailed, AgentResult, AgentTask, is_policy_error, parse_result, read_result
from rlscale.trajectory import Trajectory
from rlscale.types import Failure, FailureCause, Prompt


def test_a_task_has_the_messages_of_its_row() -> None:
    prompt = Prompt(index=4, text="1+1=", token_ids=(1,), label=2, metadata={"kind": "sum"})
    task = AgentTask.from_trajectory(Trajectory(id=9, group_index=1, prompt=prompt, seed=3), is_evaluation=True)
    assert task.to_json() == {
        "id": 9,
        "row": 4,
        "messages": [{"role": "user", "content": "1+1="}],
        "label": 2,
        "metadata": {"kind": "sum"},
        "seed": 3,
        "is_evaluation": True,
    }
    assert AgentTask(**task.to_json()) == task


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (None, AgentResult()),
        (0.5, AgentResult(reward=0.5)),
        (True, AgentResult(reward=1.0)),
        ({}, AgentResult()),
        ({"reward": 1, "metadata": {"calls": (1, 2)}}, AgentResult(reward=1.0, metadata={"calls": [1, 2]})),
        (
            {"failure": "policy", "message": "no tool of this name"},
            AgentResult(failure=Failure(cause=FailureCause.policy, message="no tool of this name")),
        ),
    ],
)
def test_results(value: Any, result: AgentResult) -> None:
    assert read_result(value) == result


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "its result must have a finite number as reward, got nan"),
        ("good", "its result must have a finite number as reward, got 'good'"),
        ({"rewards": 1}, "its result must have the keys reward, metadata, failure and message only, got rewards"),
        ({"failure": "tool"}, "its result must have a failure of policy or budget, got 'tool'"),
        ({"metadata": {"a": {1, 2}}}, "its result must have metadata of JSON values"),
        ({"metadata": [1]}, "its result must have a mapping as metadata, got [1]"),
    ],
)
def test_wrong_results_are_failures_of_the_controller(value: Any, message: str) -> None:
    with pytest.raises(AgentFailed) as caught:
        read_result(value)
    assert caught.value.message.startswith(message) and caught.value.cause == FailureCause.controller


@pytest.mark.parametrize("content", [b"{", b'{"reward": NaN}', b"[" * 100_000, b"\xff\xfe\x00"])
def test_a_result_that_is_no_json_is_a_failure(content: bytes) -> None:
    with pytest.raises(AgentFailed, match="its result must"):
        parse_result(content)


def test_an_empty_result_has_no_reward() -> None:
    assert parse_result(b" \n") == AgentResult()


class TurnsUsedUp(RuntimeError): ...


@pytest.mark.parametrize("name", ["TurnsUsedUp", f"{__name__}.TurnsUsedUp", "RuntimeError"])
def test_an_exception_is_found_by_its_name_or_that_of_a_base_class(name: str) -> None:
    assert is_policy_error(TurnsUsedUp(), (name,)) and not is_policy_error(ValueError(), (name,))
