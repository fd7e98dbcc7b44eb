"""What the tokens of another policy are worth: which correction of `algo` a config asks for.

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
from rlscale.training.loss.user_hooks import NO_CUSTOM, weight_function
from rlscale.training.loss.user_outputs import OF_THE_TRAINER, check_column, check_pair, check_sums
from rlscale.types import TokenColumns


def normalizes_weights(algo: AlgoConfig) -> bool:
    """Whether weights are divided by their mean over the rollout."""
    is_mis = algo.tis_type == TisType.mis and algo.custom_tis_function_path is None
    return algo.loss_type == LossType.policy_loss and algo.use_tis and is_mis and algo.mis.normalize


def engine_weights(
    algo: AlgoConfig,
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    layout: TokenLayout,
    custom: Mapping[str, Any] = NO_CUSTOM,
    taken: Set[str] = OF_THE_TRAINER,
) -> tuple[Tensor, Sums]:
    """The factors of the policy loss with `algo.use_tis`, before normalisation, and their metrics.

    Args:
        algo: the group of the config.
        old_logprobs: logprobs by the trainer of the policy that is improved. [R]
        rollout_logprobs: logprobs the engine reported. [R]
        layout: of the R tokens.
        custom: the config's node `custom`, for a function of the user.
        taken: names that its metrics may not have.

    Returns:
        Factors without gradient, 0 where not trainable. [R]
    """
    if algo.custom_tis_function_path is not None:
        path, tokens = (
            algo.custom_tis_function_path,
            _columns(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, layout=layout),
        )
        given, metrics = check_pair(weight_function(path, custom)(tokens), path=path, what="weights")
        weights = check_column(given, name=f"the weights of {path}", layout=layout).detach()
        return zero_masked(weights, mask_T=layout.mask_T), check_sums(
            metrics, path=path, like=old_logprobs, taken=taken
        )
    if algo.tis_type == TisType.tis:
        return truncated_importance_weights(
            old_logprobs, rollout_logprobs_T=rollout_logprobs, layout=layout, low=algo.tis_clip_low, high=algo.tis_clip
        )
    return importance_weights(
        old_logprobs, rollout_logprobs_T=rollout_logprobs, layout=layout, correction=_correction(algo)
    )


def _correction(algo: AlgoConfig) -> Correction:
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


def _columns(*, old_logprobs: Tensor, rollout_logprobs: Tensor, layout: TokenLayout) -> TokenColumns:
    """What a function of the user sees."""
    return TokenColumns(
        mask=layout.mask_T,
        sample_ids=layout.sample_ids_T,
        num_samples=layout.num_samples,
        old_logprobs=old_logprobs.detach(),
        rollout_logprobs=rollout_logprobs.detach(),
    )
