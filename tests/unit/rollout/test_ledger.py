"""Ledger: one outcome for each trajectory."""

import pytest

from rlscale.errors import CheckError
from rlscale.rollout.ledger import Ledger, outcome_metrics


def test_a_page_has_the_outcomes_since_the_page_before() -> None:
    ledger = Ledger()
    ledger.open(range(8))
    ledger.record("failed/grader", [3])
    ledger.record("dropped/equal_rewards", [4, 5])
    ledger.record("trained", [2, 0, 1])
    first = ledger.close_page(0)
    assert first.to_json() == {
        "step": 0,
        "dropped/equal_rewards": ["4-5"],
        "failed/grader": ["3"],
        "trained": ["0-2"],
        "open": ["6-7"],
    }
    ledger.record("trained", [6, 7])
    assert ledger.close_page(1).to_json() == {"step": 1, "trained": ["6-7"], "open": []}


@pytest.mark.parametrize("ids", [[0], [9], [1, 1]])
def test_a_second_outcome_and_an_unknown_trajectory_are_errors(ids: list[int]) -> None:
    ledger = Ledger()
    ledger.open(range(3))
    ledger.record("trained", [0])
    with pytest.raises(CheckError, match="one outcome"):
        ledger.record("dropped/x", ids)


def test_an_open_trajectory_that_nothing_holds_is_an_error() -> None:
    ledger = Ledger()
    ledger.open(range(6))
    ledger.record("trained", [0, 1])
    ledger.check_open([5, 2, 3, 4])
    with pytest.raises(CheckError, match=r"got 2 that are in no rollout and not in the buffer: \[3, 4\];"):
        ledger.check_open([2, 5])
    with pytest.raises(CheckError, match=r"got 1 that wait although they have an outcome: \[1\];"):
        ledger.check_open([1, 2, 3, 4, 5])


def test_metrics_count_outcomes_and_give_the_share_of_failures() -> None:
    ledger = Ledger()
    ledger.open(range(10))
    ledger.record("trained", range(6))
    ledger.record("failed/tool", [6])
    ledger.record("failed/grader", [7])
    assert outcome_metrics(ledger.close_page(0)) == {
        "trajectories/trained": 6.0,
        "trajectories/failed/tool": 1.0,
        "trajectories/failed/grader": 1.0,
        "trajectories/open": 2.0,
        "trajectories/failed_share": 0.25,
    }


def test_a_rollout_in_which_everything_was_trained_has_no_metrics() -> None:
    ledger = Ledger()
    ledger.open(range(4))
    ledger.record("trained", range(4))
    assert outcome_metrics(ledger.close_page(0)) == {}
