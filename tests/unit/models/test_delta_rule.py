"""The gated delta rule by chunks, compared with the recurrence, and convolutions of packed samples."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.models.delta_rule import causal_convolution, convolve_last, gated_delta_rule, gated_delta_step

SAMPLES, HEADS, WIDTH, VALUE_WIDTH = 2, 3, 8, 6


def inputs(length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(SAMPLES, HEADS, length, *shape, generator=generator, dtype=torch.float64)

    return {
        "query": normal(WIDTH),
        "key": normal(WIDTH),
        "value": normal(VALUE_WIDTH),
        "log_decay": -normal().abs(),
        "beta": normal().sigmoid(),
    }


def recurrence(query: Tensor, key: Tensor, value: Tensor, *, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The formula of `gated_delta_rule`, position by position: outputs and the last state."""
    state, outputs = torch.zeros(SAMPLES, HEADS, WIDTH, VALUE_WIDTH, dtype=query.dtype), []
    for t in range(query.shape[2]):
        q, k = (F.normalize(x[:, :, t], dim=-1) for x in (query, key))
        state = state * log_decay[:, :, t, None, None].exp()
        read = (k.unsqueeze(-2) @ state).squeeze(-2)
        written = (value[:, :, t] - read) * beta[:, :, t, None]
        state = state + k.unsqueeze(-1) @ written.unsqueeze(-2)
        outputs.append((q.unsqueeze(-2) @ state).squeeze(-2) * WIDTH**-0.5)
    return torch.stack(outputs, dim=2), state


# A single position, less than a chunk, a whole chunk, and more than two with padding.
@pytest.mark.parametrize("length", [1, 7, 64, 150])
def test_chunks_compute_the_recurrence(length: int) -> None:
    exact = {name: x.requires_grad_() for name, x in inputs(length).items()}
    single = {name: x.detach().float().requires_grad_() for name, x in exact.items()}
    (expected, expected_state), (found, state) = recurrence(**exact), gated_delta_rule(**single)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)
    torch.testing.assert_close(state.double(), expected_state, rtol=0, atol=5e-6)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (expected * weights).sum().backward()
    (found * weights.float()).sum().backward()
    for name, x in exact.items():
        assert x.grad is not None and single[name].grad is not None
        torch.testing.assert_close(single[name].grad.double(), x.grad, rtol=0, atol=2e-5)


def test_a_strong_decay_does_not_overflow() -> None:
    given = inputs(100)
    given["log_decay"] = torch.full_like(given["log_decay"], -80.0)
    found, _ = gated_delta_rule(**given)
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), recurrence(**given)[0], rtol=0, atol=5e-6)


@pytest.mark.parametrize("length", [1, 3, 70])
def test_steps_continue_from_the_state_of_chunks(length: int) -> None:
    steps = 5
    given = {name: x.float() for name, x in inputs(length + steps).items()}
    expected, expected_state = gated_delta_rule(**given)
    _, state = gated_delta_rule(**{name: x[:, :, :length] for name, x in given.items()})
    for t in range(length, length + steps):
        found = gated_delta_step(**{name: x[:, :, t] for name, x in given.items()}, state=state)
        torch.testing.assert_close(found, expected[:, :, t], rtol=0, atol=2e-6)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=2e-6)


def test_positions_without_decay_and_beta_keep_the_state() -> None:
    given, length = {name: x.float() for name, x in inputs(80).items()}, 7
    for name in ("log_decay", "beta"):
        given[name][:, :, length:] = 0
    _, state = gated_delta_rule(**given)
    _, expected = gated_delta_rule(**{name: x[:, :, :length] for name, x in given.items()})
    torch.testing.assert_close(state, expected, rtol=0, atol=1e-6)


def test_a_packed_convolution_reads_no_other_sample() -> None:
    lengths, width = [1, 2, 7, 4], 4
    generator = torch.Generator().manual_seed(1)
    rows, weight = torch.randn(sum(lengths), 5, generator=generator), torch.randn(5, width, generator=generator)
    positions = torch.cat([torch.arange(each) for each in lengths])
    found = causal_convolution(rows[None], weight, positions)[0]
    alone = [
        F.conv1d(F.pad(sample.T[None], (width - 1, 0)), weight[:, None], groups=5)[0].T
        for sample in rows.split(lengths)
    ]
    torch.testing.assert_close(found, torch.cat(alone), rtol=0, atol=1e-6)


def test_the_last_position_of_a_convolution() -> None:
    generator = torch.Generator().manual_seed(2)
    rows, weight = torch.randn(3, 9, 5, generator=generator), torch.randn(5, 4, generator=generator)
    expected = causal_convolution(rows, weight, torch.arange(9))[:, -1]
    torch.testing.assert_close(convolve_last(rows[:, -4:], weight), expected, rtol=0, atol=1e-6)
