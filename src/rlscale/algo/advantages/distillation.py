"""On-policy distillation: a teacher's opinion of every token, added to any estimator's advantages."""

from torch import Tensor

from rlscale.algo.ragged import TokenLayout, at_least_float32, check_vectors, zero_masked


def distill(advantages_T: Tensor, *, student_T: Tensor, teacher_T: Tensor, layout: TokenLayout, coef: float) -> Tensor:
    """A_t - coef (lp_student - lp_teacher) at trainable tokens, 0 elsewhere, without gradient. [T]

    The difference is the single-sample estimate of the reverse KL divergence from the teacher (on-policy distillation:
    MiniLLM, arXiv:2306.08543; GKD, arXiv:2306.13649). Before whitening.

    Args:
        advantages_T: of any estimator. [T]
        student_T, teacher_T: logprobs of the tokens under the policy that drew them and under the teacher. [T]
        layout: samples and trainable tokens.
        coef: weight of the teacher; 0 changes nothing.
    """
    mask_T = layout.mask_T
    check_vectors(mask_T=mask_T, advantages_T=advantages_T, student_T=student_T, teacher_T=teacher_T)
    advantages_T = zero_masked(at_least_float32(advantages_T.detach()), mask_T=mask_T)
    student_T, teacher_T = (
        zero_masked(column.detach().to(advantages_T.dtype), mask_T=mask_T) for column in (student_T, teacher_T)
    )
    return advantages_T - coef * (student_T - teacher_T)
