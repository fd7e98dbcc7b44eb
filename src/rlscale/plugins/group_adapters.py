"""Functions in slime's form that get finished samples: filters, post-processing of rewards, logging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlscale.plugins.args_view import Args
from rlscale.plugins.sample_view import DocumentSample, copy_changes, to_document
from rlscale.plugins.user_hook import shown
from rlscale.types import Group, Sample

DocumentGroup = list[DocumentSample] | list[list[DocumentSample]]
"""The samples of a group; a list for each trajectory if one of them has several samples."""


class DocumentDynamicFilter:
    """`filter(args, samples, **kwargs)` as a `DynamicFilter`."""

    def __init__(self, function: Callable[..., Any], args: Args) -> None:
        self._function, self._args = function, args

    def __call__(self, group: Group) -> bool | str:
        """Whether to keep the group; the reason if not.

        Raises:
            TypeError: the function returned neither a bool nor an object with an attribute `keep`.
        """
        found = self._function(self._args, document_group(group)[0])
        keep = getattr(found, "keep", found)
        # numpy's and torch's bools are no bool.
        if not isinstance(keep, bool) and not hasattr(keep, "item"):
            raise TypeError(
                f"{function_name(self._function)} must return a bool or an object with `keep`, got {found!r}"
            )
        return True if keep else str(getattr(found, "reason", None) or function_name(self._function))


class DocumentBufferFilter:
    """`filter(args, rollout_id, buffer, num_samples)` as a `BufferFilter`.

    It returns groups of `buffer`, which it may also remove from that list. `rollout_id` is None, as in slime.
    """

    def __init__(self, function: Callable[..., Any], args: Args) -> None:
        self._function, self._args = function, args

    def __call__(self, buffer: Sequence[Group], num_groups: int) -> Sequence[Group]:
        """The selected groups of `buffer`.

        Raises:
            ValueError: the function returned something that is not in the buffer.
        """
        documents = [self._convert(group) for group in buffer]
        chosen = self._function(self._args, None, list(documents), num_groups)
        # By identity: two groups of one prompt may be equal.
        groups = {id(document): group for document, group in zip(documents, buffer, strict=True)}
        if not isinstance(chosen, list | tuple) or not all(id(each) in groups for each in chosen):
            raise ValueError(f"{function_name(self._function)} must return groups of the buffer, got {shown(chosen)}")
        return [groups[id(each)] for each in chosen]

    def _convert(self, group: Group) -> DocumentGroup:
        if group.samples:
            return document_group(group)[0]
        # Drawn and not started: as many pending samples as the group will have.
        blank = Sample(index=0, group_index=group.index, prompt=group.prompt, seed=0)
        return [to_document(blank) for _ in range(self._args.n_samples_per_prompt)]


class DocumentSampleFilter:
    """`filter(args, groups)` as a `SampleFilter`: it sets `remove_sample` or `loss_mask`."""

    def __init__(self, function: Callable[..., Any], args: Args) -> None:
        self._function, self._args = function, args

    def __call__(self, groups: Sequence[Group]) -> None:
        converted = [document_group(group) for group in groups]
        # The list itself is a copy: the groups of a rollout stay.
        self._function(self._args, [nested for nested, _ in converted])
        for group, (_, documents) in zip(groups, converted, strict=True):
            for document, sample in zip(documents, group.samples, strict=True):
                copy_changes(document, sample)


class DocumentAllSamplesHook:
    """`process(args, all_samples, data_source)` as an `AllSamplesHook`.

    The data source is None: prompts are drawn in a reproducible order, which a function must not change.
    """

    def __init__(self, function: Callable[..., Any], args: Args) -> None:
        self._function, self._args = function, args

    def __call__(self, groups: Sequence[Group]) -> None:
        self._function(self._args, [document_group(group)[0] for group in groups], None)


class DocumentRewardPostProcess:
    """`post_process(args, samples) -> (raw_rewards, rewards)` as a `RewardPostProcess`; the second list is used."""

    def __init__(self, function: Callable[..., Any], args: Args) -> None:
        self._function, self._args = function, args

    def __call__(self, groups: Sequence[Group]) -> Sequence[float]:
        """The rewards for advantages, in the order of the samples.

        Raises:
            TypeError: the function returned no pair.
        """
        found = self._function(self._args, _flat(groups))
        if not isinstance(found, tuple | list) or len(found) != 2:
            name = function_name(self._function)
            raise TypeError(f"{name} must return (raw_rewards, rewards), got {type(found).__name__}")
        return as_list(found[1])


class DocumentRolloutLog:
    """`log(rollout_id, args, samples, rollout_extra_metrics, rollout_time)` as a `RolloutLogFunction`."""

    def __init__(self, function: Callable[..., Any], args: Args) -> None:
        self._function, self._args = function, args

    def __call__(self, rollout_id: int, groups: Sequence[Group], metrics: dict[str, float]) -> bool:
        seconds = metrics.get("time/rollout_s", metrics.get("time/generation_s", 0.0))
        return bool(self._function(rollout_id, self._args, _flat(groups), metrics, seconds))


class DocumentEvalLog:
    """`log(rollout_id, args, data, extra_metrics)` as an `EvalLogFunction`; `data` is that of an eval function."""

    def __init__(self, function: Callable[..., Any], args: Args) -> None:
        self._function, self._args = function, args

    def __call__(self, rollout_id: int, groups: dict[str, Sequence[Group]], metrics: dict[str, float]) -> bool:
        data = {
            name: _eval_data([sample for group in of_set for sample in group.samples])
            for name, of_set in groups.items()
        }
        return bool(self._function(rollout_id, self._args, data, metrics))


def document_group(group: Group) -> tuple[DocumentGroup, list[DocumentSample]]:
    """The group as functions in slime's form get it, and its samples in order."""
    documents = [to_document(sample) for sample in group.samples]
    by_trajectory: dict[int, list[DocumentSample]] = {}
    for sample, document in zip(group.samples, documents, strict=True):
        by_trajectory.setdefault(sample.index, []).append(document)
    if len(by_trajectory) == len(documents):
        return list(documents), documents
    return list(by_trajectory.values()), documents


def function_name(function: Any) -> str:
    """The name of a function in messages."""
    inner = getattr(function, "func", function)  # a partial object
    return str(getattr(inner, "__name__", type(inner).__name__))


def as_list(values: Any) -> list[Any]:
    """A list of a list, a numpy array or a torch tensor."""
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _flat(groups: Sequence[Group]) -> list[DocumentSample]:
    return [to_document(sample) for group in groups for sample in group.samples]


def _eval_data(samples: Sequence[Sample]) -> dict[str, Any]:
    documents = [to_document(sample) for sample in samples]
    return {
        "rewards": [document.reward for document in documents],
        "truncated": [document.status == DocumentSample.Status.TRUNCATED for document in documents],
        "samples": documents,
    }
