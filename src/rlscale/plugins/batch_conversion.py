"""Conversion of samples into a training batch by the user: `train.convert_samples_path`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlscale.plugins.args_view import Args
from rlscale.plugins.sample_view import to_document
from rlscale.types import Group, TrainBatch

BATCH_RULE = "return a batch with a row for each sample, whose columns fit each other"

_TOKEN_COLUMNS = ("tokens", "loss_mask", "rollout_logprobs", "weight_versions")


class DocumentBatchConversion:
    """`convert(args, samples) -> dict` of slime as a `BatchConversion`.

    Used of the dict are tokens, response_lengths, rewards, loss_masks and rollout_log_probs; what is missing stays.
    """

    def __init__(self, function: Callable[..., Any], args: Args) -> None:
        self._function, self._args = function, args

    def __call__(self, groups: Sequence[Group], batch: TrainBatch) -> TrainBatch:
        """The batch with the lists of the dict.

        Raises:
            TypeError: the function returned no dict.
            ValueError: a list does not have an entry for each sample.
        """
        samples = [to_document(sample) for group in groups for sample in group.samples]
        data = self._function(self._args, samples)
        if not isinstance(data, Mapping):
            raise TypeError(f"a conversion must return a dict of lists, got {type(data).__name__}")
        rows = [
            _convert_row(data, batch, number, num_samples=len(samples), index=sample.index)
            for number, sample in enumerate(samples)
        ]
        rewards = batch.rewards if "rewards" not in data else np.asarray(data["rewards"], np.float32)
        columns = {name: np.concatenate([row[name] for row in rows]) for name in _TOKEN_COLUMNS}
        lengths = [len(row["tokens"]) for row in rows]
        fitting: dict[str, Any] = {name: values.astype(getattr(batch, name).dtype) for name, values in columns.items()}
        return replace(
            batch,
            **fitting,
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
            prompt_lens=np.asarray([row["prompt_len"] for row in rows], np.int32),
            rewards=rewards,
        )


def _convert_row(
    data: Mapping[str, Any], batch: TrainBatch, number: int, *, num_samples: int, index: Any
) -> dict[str, Any]:
    """The columns of one sample."""

    def entry(name: str) -> Any:
        values = data.get(name)
        if values is not None and len(values) != num_samples:
            raise ValueError(f"{name} of a conversion must have {num_samples} entries, got {len(values)}")
        return None if values is None else values[number]

    indices = entry("sample_indices")
    if indices is not None and int(indices) != index:
        raise ValueError(
            f"sample_indices of a conversion must keep the order of the samples, got {indices} for {index}"
        )
    start, end = batch.offsets[number : number + 2].tolist()
    row = {name: getattr(batch, name)[start:end] for name in _TOKEN_COLUMNS}
    row["prompt_len"] = int(batch.prompt_lens[number])
    tokens, length = entry("tokens"), entry("response_lengths")
    before = end - start - row["prompt_len"]
    length = before if length is None else int(length)
    if tokens is not None:
        row["tokens"] = np.asarray(tokens)
    if length != before or len(row["tokens"]) != end - start:
        row["prompt_len"] = len(row["tokens"]) - length
        row |= _fresh_columns(row, length, oldest=row["weight_versions"][-before:] if before else np.zeros(1))
    zeros = np.zeros(row["prompt_len"])
    for name, given in (("loss_mask", "loss_masks"), ("rollout_logprobs", "rollout_log_probs")):
        values = entry(given)
        if values is not None:
            row[name] = np.concatenate([zeros, np.asarray(values)])
    return row


def _fresh_columns(row: Mapping[str, Any], length: int, *, oldest: Any) -> dict[str, Any]:
    """Columns of a response of another length. Its tokens count as made by the oldest weights of the sample."""
    num_prompt = row["prompt_len"]
    return {
        "loss_mask": np.repeat([0, 1], [num_prompt, length]),
        # NaN is refused: a function that changes the length sets the logprobs, too.
        "rollout_logprobs": np.concatenate([np.zeros(num_prompt), np.full(length, np.nan)]),
        "weight_versions": np.repeat([-1, int(oldest.min())], [num_prompt, length]),
    }


def without_stale_named_rewards(before: TrainBatch, after: TrainBatch) -> TrainBatch:
    """`after`, without the named rewards of `before` where it has other rewards, which are no sum of these."""
    if after.named_rewards is not before.named_rewards or np.array_equal(after.rewards, before.rewards):
        return after
    return replace(after, named_rewards=None, reward_names=(), reward_weights=())


def batch_problem(before: TrainBatch, after: Any) -> str | None:
    """The defect of the batch of a conversion; None: it has none."""
    if not isinstance(after, TrainBatch):
        return type(after).__name__
    for name in ("group_ids", "trajectory_ids"):
        if not np.array_equal(getattr(before, name), getattr(after, name)):
            return f"other {name}"
    num_samples, num_tokens = before.num_samples, len(after.tokens)
    if len(after.prompt_lens) != num_samples or len(after.rewards) != num_samples:
        return f"{len(after.prompt_lens)} rows and {len(after.rewards)} rewards for {num_samples} samples"
    if len(after.offsets) != num_samples + 1 or after.offsets[0] or after.offsets[-1] != num_tokens:
        return f"offsets that do not end at the {num_tokens} tokens"
    for name in _TOKEN_COLUMNS:
        if len(getattr(after, name)) != num_tokens:
            return f"{len(getattr(after, name))} values of {name} for {num_tokens} tokens"
    if (np.diff(after.offsets) < after.prompt_lens).any() or (after.prompt_lens < 1).any():
        return "a sample without a prompt, or with fewer tokens than its prompt"
    return _value_problem(after)


def _value_problem(batch: TrainBatch) -> str | None:
    starts = batch.offsets[:-1]
    in_prompt = np.zeros(len(batch.tokens), bool)
    for start, number in zip(starts.tolist(), batch.prompt_lens.tolist(), strict=True):
        in_prompt[start : start + number] = True
    trained = batch.loss_mask.astype(bool)
    if (trained & in_prompt).any() or not set(np.unique(batch.loss_mask).tolist()) <= {0, 1}:
        return "a loss mask of a prompt, or with values other than 0 and 1"
    if not np.isfinite(batch.rewards).all():
        return "a reward that is no finite number"
    _, first, rows = np.unique(batch.trajectory_ids, return_index=True, return_inverse=True)
    if (batch.rewards[first[rows]] != batch.rewards).any():
        return "different rewards of the samples of one trajectory"
    if not np.isfinite(batch.rollout_logprobs[trained]).all():
        return "logprobs of trainable tokens that are no finite numbers; set rollout_log_probs"
    if batch.routes is not None and len(batch.routes) != len(batch.tokens):
        return "routes of other tokens"
    return None
