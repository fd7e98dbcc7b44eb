"""Divergence from a teacher over its tokens, compared with torch."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.algo.distillation import teacher_kl
from rlscale.algo.ragged import TokenLayout
from rlscale.config import AlgoConfig
from rlscale.config.groups.algo import OpdDirection, OpdKl
from rlscale.training.loss.token_loss import TokenInputs, compute_token_losses

NUM_TOKENS, VOCAB = 5, 11
ALL = torch.ones(NUM_TOKENS, dtype=torch.bool)


def logits(seed: int, *, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(NUM_TOKENS, VOCAB, generator=generator, dtype=torch.float64)


def top(teacher: Tensor, number: int) -> dict[str, Tensor]:
    logprobs, ids = torch.log_softmax(teacher, dim=-1).topk(number, dim=-1)
    return {"top_ids_TK": ids, "top_logprobs_TK": logprobs}


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_whole_vocabulary_gives_the_divergence_and_gradient_of_torch(direction: str) -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    found = teacher_kl(student, **top(teacher, VOCAB), mask_T=ALL, direction=direction)
    log_p, log_q = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    pair = (log_q, log_p) if direction == "reverse" else (log_p, log_q)
    # torch: kl_div(input, target) is KL(target || input).
    expected = F.kl_div(*pair, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(found, expected)
    [grad] = torch.autograd.grad(found.sum(), student, retain_graph=True)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), student)[0])


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_top_k_is_the_divergence_with_one_outcome_for_the_rest(direction: str) -> None:
    student, teacher = logits(0), logits(1)
    values = [teacher_kl(student, **top(teacher, k), mask_T=ALL, direction=direction) for k in range(1, VOCAB + 1)]
    ids = top(teacher, 3)["top_ids_TK"]
    p, q = (torch.softmax(each, -1) for each in (student, teacher))
    p, q = (torch.cat([x.gather(1, ids), 1 - x.gather(1, ids).sum(-1, keepdim=True)], -1) for x in (p, q))
    expected = (p * (p / q).log()).sum(-1) if direction == "reverse" else (q * (q / p).log()).sum(-1)
    torch.testing.assert_close(values[2], expected)
    # Finer outcomes never decrease the divergence.
    for coarse, fine in pairwise(values):
        assert (fine >= coarse - 1e-12).all() and (coarse >= -1e-12).all()


@pytest.mark.parametrize("number", [1, 4, VOCAB])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_it_is_zero_with_zero_gradient_where_student_and_teacher_agree(number: int, direction: str) -> None:
    student = logits(3).requires_grad_()
    found = teacher_kl(student, **top(student.detach(), number), mask_T=ALL, direction=direction)
    [grad] = torch.autograd.grad(found.sum(), student)
    torch.testing.assert_close(found.detach(), torch.zeros_like(found))
    torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-6, rtol=0)


def test_masked_tokens_have_no_value_and_no_gradient() -> None:
    student, mask = logits(0), ALL.clone()
    mask[1] = False
    student[1] = torch.inf
    student.requires_grad_()
    columns = top(logits(1), 4)
    columns["top_logprobs_TK"][1] = torch.nan
    found = teacher_kl(student, **columns, mask_T=mask, direction="reverse")
    [grad] = torch.autograd.grad(found.sum(), student)
    assert found[1] == 0 and not grad[1].any() and torch.isfinite(grad).all()


def test_a_teacher_that_is_sure_gives_finite_gradients() -> None:
    """In float32 the probabilities of its tokens sum to 1, and nothing is left for the others."""
    student, teacher = logits(0).float().requires_grad_(), logits(1, scale=80.0).float()
    for direction in ("reverse", "forward"):
        found = teacher_kl(student, **top(teacher, 4), mask_T=ALL, direction=direction)
        [grad] = torch.autograd.grad(found.sum(), student)
        assert torch.isfinite(found).all() and torch.isfinite(grad).all()


def test_wrong_shapes_and_directions_are_refused() -> None:
    columns = top(logits(1), 4)
    with pytest.raises(ValueError, match="must have 5 rows"):
        teacher_kl(
            logits(0), top_ids_TK=columns["top_ids_TK"][:3], top_logprobs_TK=columns["top_logprobs_TK"], mask_T=ALL
        )
    with pytest.raises(ValueError, match="direction must be reverse or forward, got 'both'"):
        teacher_kl(logits(0), **columns, mask_T=ALL, direction="both")


@pytest.mark.parametrize("kind", [OpdKl.top_k, OpdKl.full])
@pytest.mark.parametrize("direction", list(OpdDirection))
def test_the_loss_adds_the_divergence_with_its_coefficient(kind: OpdKl, direction: OpdDirection) -> None:
    student, teacher = logits(0), logits(1)
    columns = top(teacher, 4 if kind == OpdKl.top_k else VOCAB)
    layout = TokenLayout(mask_T=ALL, sample_ids_T=torch.zeros(NUM_TOKENS, dtype=torch.int64), num_samples=1)
    logprobs = torch.log_softmax(student, -1)[:, 2]

    def losses(algo: AlgoConfig) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        inputs = TokenInputs(
            advantages=torch.ones(NUM_TOKENS, dtype=torch.float64),
            teacher_kl=teacher_kl(student, **columns, mask_T=ALL, direction=direction),
        )
        return compute_token_losses(algo, logprobs=logprobs, entropy=None, inputs=inputs, layout=layout)

    plain, _ = losses(AlgoConfig())
    distilled, sums = losses(AlgoConfig(opd_kl_coef=0.5, opd_kl=kind, opd_direction=direction))
    expected = teacher_kl(student, **columns, mask_T=ALL, direction=direction)
    torch.testing.assert_close(distilled - plain, 0.5 * expected)
    torch.testing.assert_close(sums["teacher_kl"][0], expected.sum())
