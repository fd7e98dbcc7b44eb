"""Chunked logprobs and their gradients equal those of the full logits."""

import pytest
import torch
from torch import Tensor

from rlscale.algo.linear_logprobs import HeadOptions, logprobs_from_hidden
from rlscale.algo.logprobs import logprobs_and_entropy

T, V, H = 11, 37, 8


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, H).to(dtype), torch.randn(V, H).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(V, (T,))


def loss_of(logprobs: Tensor, entropy: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, T)
    return (logprobs * weights).sum() + (entropy * weights.flip(0).square()).sum()


@pytest.mark.parametrize("chunk_tokens", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_equals_the_plain_computation(chunk_tokens: int, temperature: float, entropy_grad: bool) -> None:
    hidden, weight, targets = inputs()
    plain = logprobs_and_entropy(
        hidden @ weight.t(), targets_T=targets, temperature=temperature, entropy_grad=entropy_grad
    )
    loss_of(*plain).backward()
    again, other, _ = inputs()
    options = HeadOptions(chunk_tokens=chunk_tokens, temperature=temperature, entropy_grad=entropy_grad)
    chunked = logprobs_from_hidden(again, other, targets_T=targets, options=options)
    loss_of(*chunked).backward()
    for a, b in ((chunked[0], plain[0]), (chunked[1], plain[1]), (again.grad, hidden.grad), (other.grad, weight.grad)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_bfloat16_logprobs_equal_those_of_the_rounded_logits() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    plain = logprobs_and_entropy(hidden @ weight.t(), targets_T=targets)
    loss_of(*plain).backward()
    again, other, _ = inputs(torch.bfloat16)
    chunked = logprobs_from_hidden(again, other, targets_T=targets, options=HeadOptions(chunk_tokens=3))
    loss_of(*chunked).backward()
    torch.testing.assert_close(chunked, plain, atol=1e-5, rtol=1e-5)
    for a, b in ((again.grad, hidden.grad), (other.grad, weight.grad)):
        assert a is not None and a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.05)


def test_the_entropy_alone_and_a_frozen_weight() -> None:
    hidden, weight, targets = inputs()
    weight.requires_grad_(False)
    _, entropy = logprobs_from_hidden(
        hidden, weight, targets_T=targets, options=HeadOptions(chunk_tokens=4, entropy_grad=True)
    )
    entropy.sum().backward()
    again, other, _ = inputs()
    _, plain = logprobs_and_entropy(again @ other.t(), targets_T=targets, entropy_grad=True)
    plain.sum().backward()
    torch.testing.assert_close(hidden.grad, again.grad, atol=1e-5, rtol=1e-5)
    assert weight.grad is None


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_gradients_equal_finite_differences(temperature: float, chunk_tokens: int) -> None:
    hidden, weight, targets = (x.detach() for x in inputs(torch.float64))
    options = HeadOptions(chunk_tokens=chunk_tokens, temperature=temperature, entropy_grad=True)

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_from_hidden(hidden, weight, targets_T=targets, options=options)

    assert torch.autograd.gradcheck(both, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("scale", [1e3, 1e-3])
def test_logits_far_from_zero_and_close_to_it(scale: float) -> None:
    hidden, weight, targets = inputs()
    hidden = (scale * hidden).detach().requires_grad_()
    plain = logprobs_and_entropy((hidden @ weight.t()).double(), targets_T=targets)
    found = logprobs_from_hidden(hidden, weight, targets_T=targets, options=HeadOptions(chunk_tokens=2))
    torch.testing.assert_close([each.double() for each in found], list(plain), atol=1e-5, rtol=1e-5)
    found[0].sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_no_tile_is_larger_than_the_limit() -> None:
    hidden, weight, targets = inputs()
    sizes: list[int] = []

    def product(x: Tensor, w: Tensor) -> Tensor:
        out = torch.nn.functional.linear(x, w)
        sizes.append(out.numel())
        return out

    logprobs, _ = logprobs_from_hidden(
        hidden, weight, targets_T=targets, options=HeadOptions(chunk_tokens=3, product=product)
    )
    assert max(sizes) <= 3 * V and sum(sizes) == T * V
    logprobs.sum().backward()
    assert max(sizes) <= max(3 * V, T * H)


def test_no_tokens() -> None:
    hidden, weight, targets = inputs()
    logprobs, entropy = logprobs_from_hidden(
        hidden[:0], weight, targets_T=targets[:0], options=HeadOptions(chunk_tokens=3)
    )
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_shape_and_type_errors_name_the_argument() -> None:
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="targets_T must"):
        logprobs_from_hidden(hidden, weight, targets_T=targets[:3], options=HeadOptions(chunk_tokens=4))
    with pytest.raises(ValueError, match="agree in width and type"):
        logprobs_from_hidden(hidden, weight.bfloat16(), targets_T=targets, options=HeadOptions(chunk_tokens=4))
    with pytest.raises(ValueError, match=f"targets_T must be token ids from 0 to {V - 1}, got 0 to {V}"):
        logprobs_from_hidden(
            hidden, weight, targets_T=torch.arange(T) * V // (T - 1), options=HeadOptions(chunk_tokens=4)
        )
    with pytest.raises(ValueError, match="above 0"):
        HeadOptions(chunk_tokens=0)
