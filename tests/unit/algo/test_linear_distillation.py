"""Divergence from a teacher in tiles of the vocabulary, compared with whole softmaxes in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.algo.distillation import teacher_kl
from rlscale.algo.linear_distillation import (
    DenseTeacher,
    HiddenTeacher,
    TeacherRequest,
    TeacherRows,
    TopTeacher,
    logprobs_and_teacher_kl,
)
from rlscale.algo.linear_logprobs import HeadOptions, logprobs_from_hidden

T, V, H, G = 11, 37, 8, 6
KINDS = ["hidden", "dense", "top", "all"]
DIRECTIONS = ["reverse", "forward"]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, H, dtype=dtype), torch.randn(V, H, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(V, (T,))


def teacher_of(kind: str, dtype: torch.dtype, temperature: float, *, scale: float = 1.0) -> tuple[TeacherRows, Tensor]:
    """A teacher, and its logprobs in float64. [T, V]"""
    torch.manual_seed(1)
    hidden, weight = scale * torch.randn(T, G, dtype=dtype), torch.randn(V, G, dtype=dtype)
    logprobs = torch.log_softmax(hidden.double() @ weight.double().T / temperature, dim=-1)
    if kind == "hidden":
        return HiddenTeacher(hidden_TG=hidden, weight_VG=weight), logprobs
    if kind == "dense":
        return DenseTeacher(logprobs_TV=logprobs.to(dtype)), logprobs
    top, ids = logprobs.topk(V if kind == "all" else 5, dim=-1)
    return TopTeacher(ids_TK=ids, logprobs_TK=top.to(dtype), has_others=kind == "top"), logprobs


def expected_kl(kind: str, logits: Tensor, log_q: Tensor, direction: str) -> Tensor:
    """The divergence of torch; of the most likely tokens, with one outcome for the others. [T]"""
    log_p = torch.log_softmax(logits, dim=-1)
    if kind == "top":
        ids = log_q.topk(5, dim=-1).indices
        p, q = (
            torch.cat([x.exp().gather(1, ids), 1 - x.exp().gather(1, ids).sum(-1, True)], -1) for x in (log_p, log_q)
        )
        log_p, log_q = p.log(), q.log()
    pair = (log_q, log_p) if direction == "reverse" else (log_p, log_q)
    # torch: kl_div(input, target) is KL(target || input).
    return F.kl_div(*pair, log_target=True, reduction="none").sum(-1)


def loss_of(*columns: Tensor) -> Tensor:
    """The mean over tokens, with other weights of each."""
    slope = torch.linspace(-1, 1, T, dtype=columns[0].dtype)
    return torch.stack([(column * slope).mean() for column in columns]).sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("chunk_tokens", "temperature"), [(1, 0.7), (4, 1.0), (100, 1.0)])
def test_values_and_gradients_equal_whole_softmaxes_in_float64(
    kind: str, direction: str, chunk_tokens: int, temperature: float
) -> None:
    hidden, weight, targets = inputs()
    teacher, log_q = teacher_of(kind, torch.float32, temperature)
    options = HeadOptions(chunk_tokens=chunk_tokens, temperature=temperature, entropy_grad=True)
    found = logprobs_and_teacher_kl(
        hidden, weight, targets_T=targets, request=TeacherRequest(rows=teacher, direction=direction), options=options
    )
    loss_of(*found).backward()
    exact, other = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = exact @ other.T / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    expected = (
        log_p.gather(1, targets[:, None]).squeeze(1),
        -(log_p.exp() * log_p).sum(-1),
        expected_kl(kind, logits, log_q, direction),
    )
    loss_of(*expected).backward()
    torch.testing.assert_close(found[2].double(), expected[2], atol=1e-6, rtol=1e-6)
    for a, b in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-6, rtol=1e-6)
    for a, b in ((hidden.grad, exact.grad), (weight.grad, other.grad)):
        assert a is not None and b is not None
        torch.testing.assert_close(a.double(), b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_equal_finite_differences(kind: str, direction: str) -> None:
    hidden, weight, targets = (x.detach() for x in inputs(torch.float64))
    teacher, _ = teacher_of(kind, torch.float64, 0.7)
    options = HeadOptions(chunk_tokens=2, temperature=0.7, entropy_grad=True)

    def terms(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return logprobs_and_teacher_kl(
            hidden,
            weight,
            targets_T=targets,
            request=TeacherRequest(rows=teacher, direction=direction),
            options=options,
        )

    # fast_mode compares random projections of the Jacobian, which sees a wrong entry as well.
    assert torch.autograd.gradcheck(terms, (hidden.requires_grad_(), weight.requires_grad_()), fast_mode=True)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_most_likely_tokens_are_the_whole_vocabulary_where_all_are_given(direction: str) -> None:
    hidden, weight, targets = inputs(torch.float64)
    values = {}
    for kind in ("hidden", "dense", "all"):
        teacher, _ = teacher_of(kind, torch.float64, 1.0)
        options = HeadOptions(chunk_tokens=3)
        *_, kl = logprobs_and_teacher_kl(
            hidden,
            weight,
            targets_T=targets,
            request=TeacherRequest(rows=teacher, direction=direction),
            options=options,
        )
        values[kind] = (kl, *torch.autograd.grad(kl.sum(), (hidden, weight)))
    for kind in ("dense", "all"):
        torch.testing.assert_close(values[kind], values["hidden"], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sharp_distributions_have_finite_values_and_gradients(kind: str, direction: str) -> None:
    """Nearly all probability is at one token of each model: that of others is 0 in float32."""
    hidden, weight, targets = inputs()
    teacher, _ = teacher_of(kind, torch.float32, 1.0, scale=20.0)
    large = (hidden.detach() * 50).requires_grad_()
    *_, kl = logprobs_and_teacher_kl(
        large,
        weight,
        targets_T=targets,
        request=TeacherRequest(rows=teacher, direction=direction),
        options=HeadOptions(chunk_tokens=2),
    )
    kl.sum().backward()
    assert (kl >= -1e-4).all() and torch.isfinite(kl).all()
    assert large.grad is not None and torch.isfinite(large.grad).all()
    if kind == "top":
        assert isinstance(teacher, TopTeacher)
        plain = teacher_kl(
            (large @ weight.T).detach(),
            top_ids_TK=teacher.ids_TK,
            top_logprobs_TK=teacher.logprobs_TK,
            mask_T=torch.ones(T, dtype=torch.bool),
            direction=direction,
        )
        torch.testing.assert_close(kl.detach(), plain, atol=1e-3, rtol=1e-3)


def test_logprobs_and_entropy_have_the_bits_without_a_teacher() -> None:
    hidden, weight, targets = inputs()
    options = HeadOptions(chunk_tokens=3, temperature=0.7)
    plain = logprobs_from_hidden(hidden, weight, targets_T=targets, options=options)
    for kind in KINDS:
        teacher, _ = teacher_of(kind, torch.float32, 0.7)
        found = logprobs_and_teacher_kl(
            hidden, weight, targets_T=targets, request=TeacherRequest(rows=teacher), options=options
        )
        assert all(torch.equal(a, b) for a, b in zip(found[:2], plain, strict=True))


def test_wrong_shapes_and_directions_are_refused() -> None:
    hidden, weight, targets = inputs()
    options = HeadOptions(chunk_tokens=3)
    rows = HiddenTeacher(hidden_TG=torch.zeros(T, G), weight_VG=torch.zeros(V - 1, G))
    with pytest.raises(ValueError, match=r"weight_VG must have shape \(37, 6\), got \(36, 6\)"):
        logprobs_and_teacher_kl(hidden, weight, targets_T=targets, request=TeacherRequest(rows=rows), options=options)
    teacher, _ = teacher_of("top", torch.float32, 1.0)
    with pytest.raises(ValueError, match="direction must be reverse or forward, got 'both'"):
        logprobs_and_teacher_kl(
            hidden, weight, targets_T=targets, request=TeacherRequest(rows=teacher, direction="both"), options=options
        )
