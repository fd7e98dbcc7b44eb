"""Importance weights of off-policy tokens: the correction of `algo` that a config selects.

Shape legend: R trainable tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor

from rlscale.algo.corrections import truncated_importance_weights
from rlscale.algo.off_policy import Band, Correction, importance_weights
from rlscale.algo.ragged import Sums, TokenLayout, zero_masked
from rlscale.config import AlgoConfig, LossType, MisConfig, TisType
from rlscale.hook_protocols import WeightFunction
from rlscale.training.loss.user_hooks import NO_CUSTOM, load_user_function
from rlscale.training.loss.user_outputs import STEP_METRICS, check_column, check_pair, check_sums
from rlscale.types import TokenColumns


def normalizes_weights(algo: AlgoConfig) -> bool:
    """True where weights are divided by their mean over the rollout."""
    is_mis = algo.tis_type == TisType.mis and algo.custom_tis_function_path is None
    return algo.loss_type == LossType.policy_loss and algo.use_tis and is_mis and algo.mis.normalize


def compute_engine_weights(
    algo: AlgoConfig,
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    layout: TokenLayout,
    custom: Mapping[str, Any] = NO_CUSTOM,
    taken: Set[str] = STEP_METRICS,
) -> tuple[Tensor, Sums]:
    """Factors of the policy loss with `algo.use_tis`, before normalisation, and their metrics.

    Args:
        algo: config group.
        old_logprobs: by the trainer, of the policy before the first step. [R]
        rollout_logprobs: by the engine. [R]
        layout: of the R tokens.
        custom: the config's node `custom`, for a function of the user.
        taken: names that metrics of that function must not have.

    Returns:
        Factors without gradient, 0 where not trainable. [R]
    """
    if algo.custom_tis_function_path is not None:
        tokens = TokenColumns(
            mask=layout.mask_T,
            sample_ids=layout.sample_ids_T,
            num_samples=layout.num_samples,
            old_logprobs=old_logprobs.detach(),
            rollout_logprobs=rollout_logprobs.detach(),
        )
        return _custom_weights(algo.custom_tis_function_path, tokens, layout=layout, custom=custom, taken=taken)
    if algo.tis_type == TisType.tis:
        return truncated_importance_weights(
            old_logprobs, rollout_logprobs_T=rollout_logprobs, layout=layout, low=algo.tis_clip_low, high=algo.tis_clip
        )
    return importance_weights(
        old_logprobs, rollout_logprobs_T=rollout_logprobs, layout=layout, correction=_correction(algo)
    )


def _custom_weights(
    path: str, tokens: TokenColumns, *, layout: TokenLayout, custom: Mapping[str, Any], taken: Set[str]
) -> tuple[Tensor, Sums]:
    function = load_user_function("algo.custom_tis_function_path", path, WeightFunction, custom=custom)
    returned, metrics = check_pair(function(tokens), path=path, what="weights")
    weights = check_column(returned, name=f"the weights of {path}", layout=layout).detach()
    sums = check_sums(metrics, path=path, like=weights, taken=taken)
    return zero_masked(weights, mask_T=layout.mask_T), sums


def _correction(algo: AlgoConfig) -> Correction:
    # IcePop is masked importance sampling per token, without rejection and veto.
    if algo.tis_type == TisType.icepop:
        return Correction(band=Band(level="token", low=algo.tis_clip_low, high=algo.tis_clip), mode="mask")
    mis = algo.mis
    return Correction(
        band=Band(level=mis.level, low=mis.low, high=algo.tis_clip),
        mode=mis.mode,
        reject=_rejection(mis, high=algo.tis_clip),
        veto=mis.veto,
    )


def _rejection(mis: MisConfig, *, high: float) -> Band | None:
    if mis.reject_level is None:
        return None
    return Band(level=mis.reject_level, low=mis.reject_low, high=high if mis.reject_high is None else mis.reject_high)
