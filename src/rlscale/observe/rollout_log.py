"""Log of rollouts for `rlscale-report`: a few complete samples, counts of all rewards and lengths.

<run>/samples.jsonl          one line per selected sample: text, tokens, logprobs of engine and trainer, weight versions
<run>/trajectories.jsonl     one line per trajectory of these samples, and of some failed ones: its tree of turns
<run>/images/<hash>.png      the images in messages of these turns, each once
<run>/distributions.jsonl    one line per rollout: counts of each reward and each length
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rlscale.images import image_digests, image_file_name
from rlscale.observe.step_lines import StepLines
from rlscale.observe.trajectory_tree import trajectory_tree
from rlscale.types import Float32, Group, Sample

SAMPLES_FILE, DISTRIBUTIONS_FILE, TRAJECTORIES_FILE = "samples.jsonl", "distributions.jsonl", "trajectories.jsonl"
IMAGES = "images"
LEDGER_FILE, TIMELINES_FILE = "ledger.jsonl", "timelines.jsonl"  # which the loop writes
STEP_FILES = (SAMPLES_FILE, TRAJECTORIES_FILE, DISTRIBUTIONS_FILE, LEDGER_FILE, TIMELINES_FILE)
"""Files of which a resumed run keeps the lines of earlier rollouts."""

MAX_VALUES = 64
"""A distribution with more distinct values is stored as this many bins of equal width."""


class TokenTexts:
    """Text that a token adds to an answer, by token id. Decodes each id once.

    Tokenizers may drop a leading space, so each token is decoded after another one. A token that is part of a character
    has the text that the tokenizer returns for such parts.

    Args:
        decode: token ids to text, including special tokens.
        anchor: the tokens in front, preferably of a plain letter.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, anchor: Sequence[int]) -> None:
        self._decode, self._anchor, self._prefix = decode, list(anchor), decode(anchor)
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        if token_id not in self._known:
            both = self._decode([*self._anchor, token_id])
            # A token that merges with the anchor has no separate suffix; decode it alone.
            keeps_prefix = both.startswith(self._prefix)
            self._known[token_id] = both[len(self._prefix) :] if keeps_prefix else self._decode([token_id])
        return self._known[token_id]


class RolloutLog:
    """Writes the files. The loop calls `write` once for each rollout, after training on it.

    Args:
        folder: run folder.
        num_samples: number of samples to store of each rollout; 0: none.
        text_of: the text that a token id adds to an answer.
        resume_at_step: records of this rollout and later are removed first.

    Example:
        log = RolloutLog(run_dir, num_samples=8, text_of=TokenTexts(tokenizer.decode, anchor=[5]), resume_at_step=0)
        batch = replace(batch, logprob_samples=log.choose(groups))
        log.write(0, groups, logprobs=trainers.train(batch, steps).logprobs)
    """

    def __init__(self, folder: Path, *, num_samples: int, text_of: Callable[[int], str], resume_at_step: int) -> None:
        self._num_samples, self._text_of, self._images = num_samples, text_of, folder / IMAGES
        self._samples = StepLines(folder / SAMPLES_FILE, resume_at_step=resume_at_step) if num_samples else None
        self._trajectories = StepLines(folder / TRAJECTORIES_FILE, resume_at_step=resume_at_step)
        self._distributions = StepLines(folder / DISTRIBUTIONS_FILE, resume_at_step=resume_at_step)

    def choose(self, groups: Sequence[Group]) -> tuple[int, ...]:
        """Indices of the samples to store, spread over the groups and within them. They index all samples in order."""
        # Start and size of each group that has samples: those of a group may all have failed.
        spans, number = [], 0
        for size in (len(group.samples) for group in groups):
            spans += [(number, size)] if size else []
            number += size
        num_chosen = min(self._num_samples, number)
        if num_chosen <= len(spans):  # evenly spaced groups; the position in the group cycles
            places = [(k, spans[k * len(spans) // num_chosen]) for k in range(num_chosen)]
            return tuple(sorted(start + k % size for k, (start, size) in places))
        # One of each group in turn, from another position in each.
        rounds = range(max(size for _, size in spans))
        turns = [start + (k + n) % size for n in rounds for k, (start, size) in enumerate(spans) if n < size]
        return tuple(sorted(turns[:num_chosen]))

    def write(self, step: int, groups: Sequence[Group], *, logprobs: Mapping[int, Float32]) -> None:
        """Adds one rollout.

        Args:
            step: number of the rollout.
            groups: all groups of the rollout.
            logprobs: trainer logprobs of the selected samples, as in `TrainResult.logprobs`.
        """
        samples = [sample for group in groups for sample in group.samples]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        record: dict[str, Any] = {
            "step": step,
            "response_len": distribution([float(sample.response_len) for sample in samples]),
        }
        if rewards:
            record["reward"] = distribution(rewards)
        self._distributions.append([record])
        if self._samples is not None:
            self._samples.append([self._record(step, samples[i], values) for i, values in sorted(logprobs.items())])
            self._trajectories.append([{"step": step, **each} for each in self._trees(groups, samples, logprobs)])

    def rewind(self, step: int) -> None:
        """Removes this rollout and later: the run returned to a checkpoint and repeats them."""
        for lines in (self._samples, self._trajectories, self._distributions):
            if lines is not None:
                lines.rewind(step)

    def close(self) -> None:
        for lines in (self._samples, self._trajectories, self._distributions):
            if lines is not None:
                lines.close()

    def _trees(
        self, groups: Sequence[Group], samples: Sequence[Sample], logprobs: Mapping[int, Float32]
    ) -> Iterator[dict[str, Any]]:
        """Trajectories of the selected samples, each once, and some that failed."""
        chosen = {samples[i].index: samples[i].group_index for i in sorted(logprobs)}
        for number, group_index in chosen.items():
            (group,) = (each for each in groups if each.index == group_index)
            yield self._tree([each for each in group.samples if each.index == number])
        failed = [sample for group in groups for sample in group.failed]
        for number in list(dict.fromkeys(sample.index for sample in failed))[: math.ceil(self._num_samples / 4)]:
            yield self._tree([each for each in failed if each.index == number])

    def _tree(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The record of a trajectory, after the files of the images in its messages."""
        shown = {digest for sample in samples for turn in sample.turns for digest in image_digests(turn.messages)}
        for image in {image.digest: image for sample in samples for image in sample.images}.values():
            if image.digest in shown:
                content = image.read()
                self._images.mkdir(exist_ok=True)
                (self._images / image_file_name(image.digest, content)).write_bytes(content)
        return trajectory_tree(samples, self._text_of)

    def _record(self, step: int, sample: Sample, trainer: Float32) -> dict[str, Any]:
        # SFT samples have no reward and no generated tokens. Their rollout logprobs are placeholders.
        engine = None if sample.reward is None else [_number(value) for value in sample.rollout_logprobs.tolist()]
        return {
            "step": step,
            "index": sample.index,
            "group": sample.group_index,
            "row": sample.prompt.index,
            "status": str(sample.status),
            "reward": sample.reward,
            "label": sample.prompt.label_text,
            "prompt": sample.prompt.text,
            "response": sample.response,
            "token_ids": sample.response_ids,
            "tokens": [self._text_of(token_id) for token_id in sample.response_ids],
            "loss_mask": _runs(sample.loss_mask.tolist()),
            "weight_versions": _runs(sample.weight_versions.tolist()),
            "engine_logprobs": engine,
            "trainer_logprobs": [_number(value) for value in trainer.tolist()],
        }


def distribution(values: Sequence[float]) -> list[list[float]]:
    """Sorted pairs of value and count. More than MAX_VALUES distinct values become centers of equal bins."""
    counts = Counter(values)
    if len(counts) > MAX_VALUES:
        low, high = min(counts), max(counts)
        width = (high - low) / MAX_VALUES
        binned: Counter[float] = Counter()
        for value, count in counts.items():
            # The maximum belongs to the last bin.
            number = min(int((value - low) / width), MAX_VALUES - 1)
            binned[low + (number + 0.5) * width] += count
        counts = binned
    return [[_number(value) or 0.0, count] for value, count in sorted(counts.items())]


def _runs(values: Sequence[int]) -> list[list[int]]:
    """Run-length encoding: [7, 7, 8] becomes [[7, 2], [8, 1]]. Masks and versions are nearly constant."""
    return [[value, len(list(same))] for value, same in groupby(values)]


def _number(value: float) -> float | None:
    """Value with seven significant digits, the precision of float32. None for NaN and infinities, which JSON lacks."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
