"""Age of a group's tokens, in weight updates."""

from rlscale.config import SamplingConfig
from rlscale.types import Group, Sample, SampleStatus, WeightVersion


def reason_to_drop(group: Group, *, oldest: WeightVersion) -> str | None:
    """The reason why a group must not be trained on; None: it may be.

    Args:
        group: as an engine or a checkpoint returned it.
        oldest: version of the oldest weights whose tokens may be trained on.
    """
    for sample in group.samples:
        if sample.status == SampleStatus.aborted:
            return f"sample {sample.index} was aborted"
        version = oldest_version(sample)
        if version is not None and version < oldest:
            return f"sample {sample.index} has a token of weight version {version}, older than {oldest}"
    return None


def max_lag(sampling: SamplingConfig) -> int:
    """Weight updates by which a trainable token may be older than `rollout.max_staleness` allows."""
    is_older = sampling.partial_rollout and not sampling.mask_offpolicy_in_partial_rollout
    return sampling.max_weight_versions - 1 if is_older else 0


def oldest_version(sample: Sample) -> WeightVersion | None:
    """The oldest weight version of a sample's trainable tokens; None: it has no trainable token."""
    versions = sample.weight_versions[sample.loss_mask.astype(bool)]
    return int(versions.min()) if len(versions) else None
