import numpy as np
import pytest
import torch

from rlscale.training.packing.token_runs import TokenRuns, count_up_to


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.99, 1.0])  # from few long runs to many short ones, and back
def test_runs_of_a_mask_are_its_true_entries(share: float) -> None:
    random = np.random.default_rng(0)
    mask = random.random(2000) < share
    runs, expected = TokenRuns.from_mask(mask), np.flatnonzero(mask)
    assert len(runs) == len(expected)
    assert runs.indices().tolist() == expected.tolist()
    column = random.integers(100, size=(len(mask), 2))
    if len(expected):
        assert runs.take(column).tolist() == column[expected].tolist()
        assert runs.take_tensor(torch.from_numpy(column)).tolist() == column[expected].tolist()
    assert (runs.lengths > 0).all() and (runs.starts[1:] > (runs.starts + runs.lengths)[:-1]).all()


def test_a_run_moves_by_its_own_distance() -> None:
    runs = TokenRuns.from_mask(np.array([True, True, False, False, True]))
    assert runs.moved(np.array([10, 0])).indices().tolist() == [10, 11, 4]
    assert runs.moved(3).indices().tolist() == [3, 4, 7]
    # Runs that are far apart do not take memory for what lies between them.
    far = TokenRuns(starts=np.array([0, 2**50]), lengths=np.array([40, 40]))
    assert far.indices().tolist() == [*range(40), *range(2**50, 2**50 + 40)]


def test_numbers_are_those_of_earlier_calls_and_read_only() -> None:
    for number in (0, 1, 2, 3, 4, 5, 1000):
        assert count_up_to(number).tolist() == list(range(number))
    assert np.shares_memory(count_up_to(1000), count_up_to(900))
    with pytest.raises(ValueError, match="read-only"):
        count_up_to(4)[0] = 1
