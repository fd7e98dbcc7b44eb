"""Small example groups, with which user functions are tried before a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlscale.types import Group, Prompt, Sample, SampleStatus, TrainBatch

_RESPONSES = ("2", "3", "two", "")


def example_groups(num_groups: int = 2) -> list[Group]:
    """Graded groups of four samples: the first with one right answer, the others without.

    Tokens are the codes of the characters. The last response of a group is empty and truncated.
    """
    return [_example_group(index, label="2" if not index else "5") for index in range(num_groups)]


def _example_group(index: int, *, label: str) -> Group:
    text = "1+1=" if not index else f"{index}+{5 - index}="
    prompt = Prompt(
        index=index, text=text, token_ids=tuple(map(ord, text)), label=label, metadata={"source": "example"}
    )
    samples = []
    for j, response in enumerate(_RESPONSES):
        sample = Sample(index=index * len(_RESPONSES) + j, group_index=index, prompt=prompt, seed=j)
        sample.append(
            list(map(ord, response)), logprobs=[-0.5] * len(response), weight_versions=[index] * len(response)
        )
        sample.response, sample.reward = response, float(response == label)
        sample.status = SampleStatus.completed if response else SampleStatus.truncated
        samples.append(sample)
    return Group(index=index, prompt=prompt, samples=samples)


def example_batch(groups: list[Group]) -> TrainBatch:
    """The batch of groups, as a run builds it."""
    samples = [sample for group in groups for sample in group.samples]
    empty = [np.zeros(sample.prompt_len) for sample in samples]

    def column(name: str, dtype: type, fill: int = 0) -> Any:
        parts = [(zeros + fill, getattr(sample, name)) for zeros, sample in zip(empty, samples, strict=True)]
        return np.concatenate([np.asarray(part) for pair in parts for part in pair]).astype(dtype)

    return TrainBatch(
        tokens=np.concatenate([sample.tokens for sample in samples]),
        loss_mask=column("loss_mask", np.uint8),
        rollout_logprobs=column("rollout_logprobs", np.float32),
        weight_versions=column("weight_versions", np.int32, fill=-1),
        offsets=np.cumsum([0, *(sample.num_tokens for sample in samples)], dtype=np.int64),
        prompt_lens=np.asarray([sample.prompt_len for sample in samples], np.int32),
        rewards=np.asarray([sample.reward for sample in samples], np.float32),
        group_ids=np.asarray([sample.group_index for sample in samples], np.int64),
        trajectory_ids=np.asarray([sample.index for sample in samples], np.int64),
        version=1,
    )
