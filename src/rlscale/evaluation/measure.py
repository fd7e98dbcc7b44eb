"""Metrics of one evaluation set, from its groups as they finish; the groups themselves are not kept."""

from __future__ import annotations

from numbers import Real
from statistics import fmean

from rlscale.observe.metrics.confidence import confidence_interval
from rlscale.observe.metrics.pass_at_k import pass_rates_by_prompt
from rlscale.types import REWARDS, Group, Sample, SampleStatus, WeightVersion


class SetMeasure:
    """Rewards, lengths and failures of a set. A trajectory counts once, however many samples it has.

    Args:
        spans_versions: weights may be updated during the evaluation: the metrics have the versions of its tokens.

    Example:
        measure = SetMeasure()
        measure.add(group)
        measure.metrics()  # {"reward_mean": 0.5, "reward_ci_low": 0.31, "reward_ci_high": 0.69, ...}
    """

    def __init__(self, *, spans_versions: bool = False) -> None:
        self._versions: tuple[WeightVersion, WeightVersion] | None = None  # oldest and newest
        self._spans_versions = spans_versions
        self._rewards: list[list[float]] = []  # by prompt
        self._lengths: list[int] = []  # by sample
        self._named: dict[str, list[float]] = {}
        self._num_prompts = self._num_truncated = self._num_failed = 0

    def add(self, group: Group) -> None:
        """Counts a finished group."""
        # The reward of a trajectory is that of its last sample.
        last = {sample.index: sample for sample in group.samples}
        rewards = [sample.reward for sample in last.values() if sample.reward is not None]
        assert len(rewards) == len(last), "every evaluated trajectory is rewarded"
        self._num_prompts += 1
        self._num_failed += len({sample.index for sample in group.failed})
        self._num_truncated += sum(sample.status == SampleStatus.truncated for sample in last.values())
        self._lengths += [sample.response_len for sample in group.samples]
        if rewards:
            self._rewards.append(rewards)
        for sample in group.samples:
            self._count_versions(sample)
        for sample in last.values():
            for name, value in sample.metadata.get(REWARDS, {}).items():
                if isinstance(value, Real):
                    self._named.setdefault(name, []).append(float(value))

    def _count_versions(self, sample: Sample) -> None:
        # Tokens that the policy did not generate have no weights.
        versions = sample.weight_versions[sample.loss_mask.astype(bool)]
        if self._spans_versions and len(versions):
            low, high = int(versions.min()), int(versions.max())
            known = self._versions or (low, high)
            self._versions = (min(low, known[0]), max(high, known[1]))

    def metrics(self) -> dict[str, float]:
        """Metrics by name; at least one trajectory has a reward. Equal for every order of the groups."""
        rewards = [reward for each in self._rewards for reward in each]
        measured = {
            "reward_mean": fmean(rewards),
            **_interval("reward", self._rewards),
            "response_len_mean": fmean(self._lengths),
            "truncated_share": self._num_truncated / len(rewards),
            "num_prompts": float(self._num_prompts),
            "num_samples": float(len(rewards)),
        }
        if self._versions is not None:
            measured |= {"version_min": float(self._versions[0]), "version_max": float(self._versions[1])}
        if self._num_failed:
            measured["failed_share"] = self._num_failed / (self._num_failed + len(rewards))
        # pass@1 is reward_mean for rewards of 0 and 1, so that k starts at 2.
        for name, rates in pass_rates_by_prompt(self._rewards, first_k=2).items():
            measured |= {name: fmean(rates), **_interval(name, [[rate] for rate in rates])}
        return measured | {f"reward/{name}/mean": fmean(values) for name, values in sorted(self._named.items())}


def _interval(name: str, prompts: list[list[float]]) -> dict[str, float]:
    found = confidence_interval(prompts)
    return {} if found is None else {f"{name}_ci_low": found[0], f"{name}_ci_high": found[1]}
