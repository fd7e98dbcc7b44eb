"""RL algorithms as pure functions of tensors and numbers: no config, files, logging or collectives.

Every function takes packed tokens [T] with a `TokenLayout`, and returns tensors and `Sums`. `TokenLayout.from_padded`
accepts padded [B, L] batches. Names in other libraries:

| here | verl | TRL | slime |
|---|---|---|---|
| logprobs_T | log_prob | per_token_logps | log_probs |
| old_logprobs_T | old_log_prob | old_per_token_logps | old_log_probs |
| ref_logprobs_T | ref_log_prob | ref_per_token_logps | ref_log_probs |
| rollout_logprobs_T | rollout_log_probs | sampling_per_token_logps | rollout_log_probs |
| mask_T | response_mask | completion_mask | loss_masks |

Checksums of weights are in `rlscale.algo.checksum`.

Example:
    from rlscale.algo import ClipRange, TokenLayout, clipped_policy_loss, mean_per_token

    layout = TokenLayout.from_padded(response_mask)  # [B, L]
    losses_T, sums = clipped_policy_loss(
        layout.pack(log_prob),
        old_logprobs_T=layout.pack(old_log_prob),
        advantages_T=layout.pack(advantages),
        layout=layout,
        clip=ClipRange(low=0.2, high=0.28),
    )
    loss = mean_per_token(losses_T, layout=layout, num_tokens=int(layout.num_trainable))
"""

from rlscale.algo.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    Advantages,
    Estimator,
    batch_std,
    distill,
    gae,
    gdpo,
    gpg,
    group_relative,
    kl_penalty,
    leave_one_out,
    length_adaptive_lambda,
    normalize_by_group,
    overlong_penalty,
    ppo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    token_rewards,
)
from rlscale.algo.corrections import (
    LogprobDifference,
    decoupled_weights,
    logprob_difference,
    truncated_importance_weights,
)
from rlscale.algo.distillation import full_teacher_kl, teacher_kl
from rlscale.algo.kl import KL_ESTIMATORS, kl_estimate
from rlscale.algo.linear_distillation import (
    DenseTeacher,
    HiddenTeacher,
    TeacherRequest,
    TopTeacher,
    logprobs_and_teacher_kl,
)
from rlscale.algo.linear_logprobs import HeadOptions, VocabShard, logprobs_from_hidden, top_logprobs_from_hidden
from rlscale.algo.logprobs import logprobs_and_entropy, logprobs_from_logits
from rlscale.algo.losses import (
    POLICY_LOSSES,
    ClipRange,
    cispo_policy_loss,
    clipped_policy_loss,
    gspo_policy_loss,
    reinforce_policy_loss,
    sapo_policy_loss,
    sft_loss,
    value_loss,
)
from rlscale.algo.off_policy import Band, Correction, importance_weights, off_policy_mask
from rlscale.algo.ragged import Sums, TokenLayout
from rlscale.algo.reduce import (
    mean_per_length,
    mean_per_token,
    mean_per_trajectory,
    tokens_per_trajectory,
    weighted_sum,
)
from rlscale.algo.sequences import discounted_sums
from rlscale.algo.whitening import apply_whitening, centred_square_sum, masked_sum, whiten

__all__ = [
    "ESTIMATORS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "AdvantageInputs",
    "Advantages",
    "Band",
    "ClipRange",
    "Correction",
    "DenseTeacher",
    "Estimator",
    "HeadOptions",
    "HiddenTeacher",
    "LogprobDifference",
    "Sums",
    "TeacherRequest",
    "TokenLayout",
    "TopTeacher",
    "VocabShard",
    "apply_whitening",
    "batch_std",
    "centred_square_sum",
    "cispo_policy_loss",
    "clipped_policy_loss",
    "decoupled_weights",
    "discounted_sums",
    "distill",
    "full_teacher_kl",
    "gae",
    "gdpo",
    "gpg",
    "group_relative",
    "gspo_policy_loss",
    "importance_weights",
    "kl_estimate",
    "kl_penalty",
    "leave_one_out",
    "length_adaptive_lambda",
    "logprob_difference",
    "logprobs_and_entropy",
    "logprobs_and_teacher_kl",
    "logprobs_from_hidden",
    "logprobs_from_logits",
    "masked_sum",
    "mean_per_length",
    "mean_per_token",
    "mean_per_trajectory",
    "normalize_by_group",
    "off_policy_mask",
    "overlong_penalty",
    "ppo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "reinforce_policy_loss",
    "rloo",
    "sapo_policy_loss",
    "sft_loss",
    "teacher_kl",
    "token_rewards",
    "tokens_per_trajectory",
    "top_logprobs_from_hidden",
    "truncated_importance_weights",
    "value_loss",
    "weighted_sum",
    "whiten",
]
