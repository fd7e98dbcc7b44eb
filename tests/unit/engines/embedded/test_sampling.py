"""Random numbers and sampling of tokens."""

import numpy as np
import torch

from rlscale.engines.embedded.sampling import RowParams, draw, uniforms
from rlscale.types import SamplingParams

NUM_ROWS = 4000


def drawn(logits: torch.Tensor, **params: float) -> np.ndarray:
    """Tokens drawn from one distribution with many seeds."""
    rows = RowParams(NUM_ROWS)
    for row in range(NUM_ROWS):
        rows.set(row, SamplingParams(max_new_tokens=1, **params), seed=row)
    return draw(logits.expand(NUM_ROWS, -1), rows, np.zeros(NUM_ROWS, np.int64))[0]


def shares(tokens: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(tokens, minlength=size) / len(tokens)


def test_uniforms_are_uniform_and_depend_on_seed_and_position_alone() -> None:
    seeds = np.arange(100, dtype=np.uint64).repeat(100)
    positions = np.tile(np.arange(100), 100)
    numbers = uniforms(seeds, positions)
    assert numbers.dtype == np.float32 and numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01 and abs(numbers.var() - 1 / 12) < 0.003
    assert len(np.unique(numbers)) > 9900
    assert np.array_equal(uniforms(seeds[50:60], positions[50:60]), numbers[50:60])
    table = numbers.reshape(100, 100)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.05


def test_known_numbers() -> None:
    # Must never change: a resumed run must draw the same tokens as an uninterrupted one.
    numbers = uniforms(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 5, 7]))
    assert (numbers * 2**24).astype(int).tolist() == [4727170, 3676141, 14599540]


def test_tokens_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2])
    found = shares(drawn(probs.log(), temperature=1.0), 4)
    assert found[1] == 0
    assert np.abs(found - probs.numpy()).max() < 0.03


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([1.0, 0.0])
    found = shares(drawn(logits, temperature=0.5), 2)
    assert abs(found[0] - torch.softmax(logits / 0.5, 0)[0].item()) < 0.03


def test_top_k_and_top_p_keep_the_most_likely() -> None:
    probs = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert set(drawn(probs.log(), top_k=2)) == {1, 3}
    assert set(drawn(probs.log(), top_p=0.5)) == {1, 3}
    assert set(drawn(probs.log(), top_p=0.01)) == {1}
    found = shares(drawn(probs.log(), top_k=2), 4)
    assert abs(found[1] - 0.4 / 0.7) < 0.03


def test_greedy_row_next_to_a_sampled_one() -> None:
    rows = RowParams(2)
    rows.set(0, SamplingParams(max_new_tokens=1, temperature=0.0), seed=1)
    rows.set(1, SamplingParams(max_new_tokens=1, temperature=2.0), seed=1)
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    tokens, logprobs = draw(logits, rows, np.zeros(2, np.int64))
    assert tokens[0] == 1
    assert abs(logprobs[0] - torch.log_softmax(logits[0], 0)[1].item()) < 1e-6
    expected = torch.log_softmax(logits[1] / 2, 0)[int(tokens[1])]
    assert abs(logprobs[1] - expected.item()) < 1e-6


def test_logprob_is_of_the_full_distribution_also_when_restricted() -> None:
    rows = RowParams(1)
    rows.set(0, SamplingParams(max_new_tokens=1, top_k=1), seed=1)
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    tokens, logprobs = draw(logits, rows, np.zeros(1, np.int64))
    assert tokens.tolist() == [1]
    assert abs(logprobs[0] - torch.log_softmax(logits[0], 0)[1].item()) < 1e-6


def test_min_p_keeps_likely_tokens() -> None:
    probs = torch.tensor([0.1, 0.4, 0.21, 0.29])
    assert set(drawn(probs.log(), min_p=0.5)) == {1, 2, 3}
    assert set(drawn(probs.log(), min_p=1.0)) == {1}
    assert set(drawn(probs.log(), min_p=0.0)) == {0, 1, 2, 3}
    found = shares(drawn(probs.log(), min_p=0.7), 4)
    assert abs(found[1] - 0.4 / 0.69) < 0.03 and abs(found[3] - 0.29 / 0.69) < 0.03
    # With several limits the narrowest applies.
    assert set(drawn(probs.log(), min_p=0.5, top_k=2)) == {1, 3}
    assert set(drawn(probs.log(), min_p=0.7, top_k=3)) == {1, 3}


def test_min_p_leaves_the_logprobs_of_the_full_distribution() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.9]])
    rows = RowParams(1)
    for seed in range(20):
        rows.set(0, SamplingParams(max_new_tokens=1, min_p=0.5, temperature=2.0), seed=seed)
        tokens, logprobs = draw(logits, rows, np.zeros(1, np.int64))
        assert int(tokens[0]) in (1, 3)
        assert abs(logprobs[0] - torch.log_softmax(logits[0] / 2, 0)[int(tokens[0])].item()) < 1e-6


def test_blocked_ids_are_drawn_from_their_position_on() -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0]]).expand(3, -1)
    rows = RowParams(3)
    greedy = SamplingParams(max_new_tokens=9, temperature=0.0)
    rows.set(0, greedy, seed=0, blocked_until=10, blocked_ids=(0,))
    rows.set(1, greedy, seed=0, blocked_until=10, blocked_ids=(0, 1))
    rows.set(2, greedy, seed=0)
    at_9, logprobs = draw(logits, rows, np.full(3, 9))
    assert at_9.tolist() == [1, 2, 0]
    # As in SGLang they have probability 0, and the others are normalized.
    assert abs(logprobs[0] - torch.log_softmax(torch.tensor([4.0, 0.0]), 0)[0].item()) < 1e-6
    assert draw(logits, rows, np.full(3, 10))[0].tolist() == [0, 0, 0]
    rows.clear(1)
    assert draw(logits, rows, np.full(3, 9))[0].tolist() == [1, 0, 0]


def penalised(counts: dict[int, int], temperature: float = 0.0, **penalties: float) -> tuple[int, float]:
    """Token and logprob with these penalties after a response with these tokens."""
    rows = RowParams(1)
    rows.set(0, SamplingParams(max_new_tokens=9, temperature=temperature, **penalties), seed=0, counts=counts)
    tokens, logprobs = draw(torch.tensor([[2.0, 1.0, -1.0, 0.5]]), rows, np.zeros(1, np.int64))
    return int(tokens[0]), float(logprobs[0])


def test_penalties_change_the_logits_of_tokens_in_the_response() -> None:
    def expected(*logits: float) -> tuple[int, float]:
        whole = torch.tensor(logits)
        return int(whole.argmax()), float(torch.log_softmax(whole, 0).max())

    cases: list[tuple[dict[int, int], dict[str, float], tuple[float, ...]]] = [
        ({0: 3}, {"frequency_penalty": 0.5}, (0.5, 1.0, -1.0, 0.5)),
        ({0: 3, 2: 1}, {"presence_penalty": 0.5}, (1.5, 1.0, -1.5, 0.5)),
        ({0: 3, 2: 1}, {"repetition_penalty": 2.0}, (1.0, 1.0, -2.0, 0.5)),
        # First subtracted, then divided or multiplied.
        ({0: 1, 1: 2}, {"repetition_penalty": 2.0, "frequency_penalty": 0.75}, (0.625, -1.0, -1.0, 0.5)),
        ({2: 5}, {"frequency_penalty": -1.0}, (2.0, 1.0, 4.0, 0.5)),
        ({}, {"frequency_penalty": 1.0}, (2.0, 1.0, -1.0, 0.5)),
    ]
    for counts, penalties, logits in cases:
        token, logprob = penalised(counts, **penalties)
        assert token == expected(*logits)[0] and abs(logprob - expected(*logits)[1]) < 1e-6, (counts, penalties)


def test_penalties_come_before_the_temperature() -> None:
    token, logprob = penalised({0: 1}, temperature=0.5, frequency_penalty=1.0)
    assert abs(logprob - torch.log_softmax(torch.tensor([1.0, 1.0, -1.0, 0.5]) / 0.5, 0)[token].item()) < 1e-6


def test_penalties_of_a_row_move_with_it_and_end_with_it() -> None:
    logits = torch.tensor([[2.0, 1.0]]).expand(3, -1)
    rows = RowParams(3)
    greedy = SamplingParams(max_new_tokens=9, temperature=0.0, presence_penalty=2.0)
    counts = {0: 1}
    rows.set(2, greedy, seed=0, counts=counts)
    rows.set(1, SamplingParams(max_new_tokens=9, temperature=0.0), seed=0, counts={0: 1})

    def tokens() -> list[int]:
        return [int(token) for token in draw(logits, rows, np.zeros(3, np.int64))[0]]

    assert tokens() == [0, 0, 1]
    rows.copy(2, 0)
    rows.clear(2)
    assert tokens() == [1, 0, 0]
    counts[1] = 1  # the response grows
    assert tokens() == [0, 0, 0]
    rows.copy(1, 0)
    counts.pop(1)
    assert tokens() == [0, 0, 0]
