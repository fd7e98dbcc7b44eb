"""Trajectory: one attempt at one prompt, a tree of turns. Its samples are the paths from the prompt to the leaves.

    prompt ── turn 0 (sampled) ── turn 1 (tool output) ─┬─ turn 2 (sampled)      path 0
                                                        └─ turn 3 (sampled)      path 1

A turn stores only the tokens that it adds. Turns 0 and 1 are in both samples, and trained in the first one only: every
sampled token is trained at most once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rlscale.expert_routes import RouteIds, merge_routes
from rlscale.images import Image, image_digests
from rlscale.types import (
    ANSWER,
    Failure,
    Float32,
    Generation,
    Int32,
    Prompt,
    Sample,
    SampleStatus,
    SampleTurn,
    UInt8,
    WeightVersion,
)

ENDS = {"stop": SampleStatus.completed, "length": SampleStatus.truncated, "abort": SampleStatus.aborted}
"""Status of a trajectory after a generation, by its finish reason."""

FORKS, CONVERSATIONS = "num_forks", "num_conversations"
"""Entries of the metadata of a trajectory: histories that no bridge could extend, and paths with their own prompt."""

CONTINUED, RESTARTED = "num_continued", "num_restarted"
"""Entries of the metadata of an agent's trajectory that a rollout aborted: how often a later one continued its turns,
and how often it began again."""


class WeightSpan(NamedTuple):
    """Consecutive tokens that one version of the weights generated."""

    version: WeightVersion
    num_tokens: int


@dataclass(kw_only=True, slots=True)
class Turn:
    """Tokens that a turn adds to the path before it.

    Invariant: `logprobs` is as long as `token_ids`, and `spans` cover all of them. Both are read-only: the sample of a
    path of one turn has the same arrays.
    """

    parent: int | None  # number of the turn before this one; None: it follows the prompt
    sampled: bool  # by the policy; False: given, e.g. the output of a tool
    text: str = ""
    token_ids: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: Float32 = field(default_factory=lambda: np.empty(0, np.float32))  # 0 where not sampled
    spans: list[WeightSpan] = field(default_factory=list)
    routes: RouteIds | None = None  # of the whole path up to this turn, except the last token
    prompt: Prompt | None = None  # of the paths that begin with this turn; None: that of the trajectory
    images: tuple[Image, ...] = ()  # that the turn adds, e.g. of a tool
    messages: tuple[Mapping[str, Any], ...] = ()  # that the turn adds, for logs; empty: not known
    interval_s: tuple[float, float] | None = None  # of the request that it answers, in seconds since the epoch

    def __post_init__(self) -> None:
        self.token_ids.setflags(write=False)
        self.logprobs.setflags(write=False)

    @property
    def versions(self) -> Int32:
        """Weight version of each token. [N]"""
        if not self.spans:
            return np.empty(0, np.int32)
        if len(self.spans) == 1:  # of most turns; several times faster
            return np.full(*self.spans[0][::-1], np.int32)
        versions, counts = zip(*self.spans, strict=True)
        return np.repeat(np.asarray(versions, np.int32), counts)

    def summary(self, number: int) -> SampleTurn:
        """The part of a sample that this turn is; `number` is that of the turn."""
        text = self.text if self.messages else ""
        return SampleTurn(number, len(self.token_ids), self.sampled, self.messages, text, self.interval_s)

    def extend(
        self, token_ids: Sequence[int] | Int32, *, logprobs: Sequence[float] | Float32, versions: Sequence[int] | Int32
    ) -> None:
        """Adds tokens at the end, e.g. when an aborted turn is continued."""
        assert len(token_ids) == len(logprobs) == len(versions), "columns of a turn must have equal length"
        self.token_ids = _joined(self.token_ids, token_ids, np.int32)
        self.logprobs = _joined(self.logprobs, logprobs, np.float32)
        for span in _spans(versions):
            # An aborted turn may be continued by the weights that began it.
            if self.spans and self.spans[-1].version == span.version:
                span = WeightSpan(span.version, self.spans.pop().num_tokens + span.num_tokens)
            self.spans.append(span)


@dataclass(kw_only=True, slots=True)
class Trajectory:
    """One attempt at one prompt.

    Example:
        trajectory = Trajectory(id=12, group_index=3, prompt=prompt, seed=7)
        answer = await session.generate(trajectory.token_ids())
        trajectory.add_generation(answer)
        trajectory.extend(tokenizer.encode("result: 4"))
        (sample,) = trajectory.samples()
    """

    id: int  # unique in the run
    group_index: int  # unique in the run
    prompt: Prompt
    seed: int
    turns: list[Turn] = field(default_factory=list)
    status: SampleStatus = SampleStatus.pending
    failure: Failure | None = None  # set by the loop; see `Failure`
    metadata: dict[str, Any] = field(default_factory=dict)
    num_attempts: int = 0  # fresh starts
    reward: float | None = None  # None: the run's reward grades it

    def extend(
        self,
        token_ids: Sequence[int] | Int32,
        *,
        logprobs: Sequence[float] | Float32 | None = None,
        weight_versions: Sequence[WeightVersion] | Int32 | None = None,
        sampled: bool = False,
        text: str = "",
        parent: int | None = -1,
    ) -> int:
        """Adds a turn and returns its number.

        Args:
            token_ids: that the turn adds. [N]
            logprobs: by the engine; needed for sampled tokens. [N]
            weight_versions: that generated them; needed for sampled tokens. [N]
            sampled: the policy generated them: they are trained.
            text: of the tokens, for rewards and logs.
            parent: number of the turn before it; -1: the last one; None: the prompt.
        """
        if sampled and (logprobs is None or weight_versions is None):
            raise ValueError(
                "a sampled turn must have logprobs and weight_versions, got none; pass those of the engine"
            )
        before = (len(self.turns) - 1 if self.turns else None) if parent == -1 else parent
        if before is not None and not 0 <= before < len(self.turns):
            raise ValueError(f"parent must be the number of an earlier turn, got {parent}")
        turn = Turn(parent=before, sampled=sampled, text=text)
        if logprobs is None:
            logprobs = np.zeros(len(token_ids), np.float32)
        if weight_versions is None:
            # Tokens that were not sampled count as made by the version of the tokens before them: they have no age.
            weight_versions = np.full(len(token_ids), self._last_version(before), np.int32)
        turn.extend(token_ids, logprobs=logprobs, versions=weight_versions)
        self.turns.append(turn)
        return len(self.turns) - 1

    def add_generation(self, answer: Generation, *, parent: int | None = -1) -> int:
        """Adds the answer of an engine as a turn, or continues the last turn if it was aborted. Sets the status."""
        if self.status == SampleStatus.aborted and parent == -1 and self.turns and self.turns[-1].sampled:
            number = len(self.turns) - 1
            turn = self.turns[number]
            turn.extend(answer.output_ids, logprobs=answer.logprobs, versions=answer.weight_versions)
            turn.text += answer.text
            if turn.interval_s is not None and answer.interval_s is not None:
                turn.interval_s = (turn.interval_s[0], answer.interval_s[1])
        else:
            number = self.extend(
                answer.output_ids,
                logprobs=answer.logprobs,
                weight_versions=answer.weight_versions,
                sampled=True,
                text=answer.text,
                parent=parent,
            )
            self.turns[number].interval_s = answer.interval_s
        self._add_routes(number, answer.routes)
        self.status = ENDS[answer.finish_reason]
        return number

    def token_ids(self, turn: int | None = -1) -> list[int]:
        """Prompt and tokens up to and with a turn; -1: the last one; None: the prompt only. Input of an engine."""
        path = list(self._path(len(self.turns) - 1 if turn == -1 else turn))
        ids = list(self._prompt_of(path).token_ids)
        for number in path:
            ids += self.turns[number].token_ids.tolist()
        return ids

    def images(self, turn: int | None = -1) -> tuple[Image, ...]:
        """Images of the prompt and of the turns up to and with a turn, see `token_ids`."""
        path = list(self._path(len(self.turns) - 1 if turn == -1 else turn))
        return _path_images(self._prompt_of(path), [self.turns[number] for number in path])

    def samples(self) -> list[Sample]:
        """One sample for each leaf, in the order of the leaves.

        A trajectory without turns yields one sample with an empty response. A path of one turn has the tokens and
        logprobs of that turn, read-only and without a copy.
        """
        if len(self.turns) == 1:  # of most trajectories
            return [self._sample(0, [0], self.turns, _turn_columns(self.turns[0]))]
        parents = {turn.parent for turn in self.turns}
        leaves = [number for number in range(len(self.turns)) if number not in parents]
        trained: set[int] = set()
        samples = []
        for path, leaf in enumerate(leaves or [None]):
            numbers = list(self._path(leaf))
            turns = [self.turns[number] for number in numbers]
            is_trained = [turn.sampled and number not in trained for number, turn in zip(numbers, turns, strict=True)]
            samples.append(self._sample(path, numbers, turns, _path_columns(turns, is_trained)))
            trained.update(numbers)
        return samples

    def restart(self) -> None:
        """Forgets all turns, for a fresh start after a failure."""
        self.turns = []
        self.metadata = {RESTARTED: self.metadata[RESTARTED]} if RESTARTED in self.metadata else {}
        self.status, self.failure, self.reward = SampleStatus.pending, None, None

    def restart_aborted(self) -> None:
        """Forgets what an earlier rollout generated before it aborted the trajectory, and counts that."""
        self.metadata[RESTARTED] = self.metadata.get(RESTARTED, 0) + 1
        self.restart()

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy generated."""
        return sum(len(turn.token_ids) for turn in self.turns if turn.sampled)

    @property
    def versions(self) -> set[WeightVersion]:
        """Versions of the weights that generated sampled tokens."""
        return {span.version for turn in self.turns if turn.sampled for span in turn.spans}

    def _sample(self, path: int, numbers: Sequence[int], turns: Sequence[Turn], columns: "_Columns") -> Sample:
        prompt = self._prompt_of(numbers)
        sample = Sample(
            index=self.id,
            group_index=self.group_index,
            prompt=prompt,
            seed=self.seed,
            path=path,
            response_tokens=columns.tokens,
            loss_mask=columns.mask,
            rollout_logprobs=columns.logprobs,
            weight_versions=columns.versions,
            response=columns.text,
            status=self.status,
            failure=self.failure,
            reward=self.reward,
            metadata=self.metadata | _last_answer(turns),
            images=_path_images(prompt, turns),
            turns=tuple(map(Turn.summary, turns, numbers)),
        )
        routed = [turn.routes for turn in turns if turn.routes is not None]
        if routed:
            sample.routes = merge_routes(routed[-1], None, num_tokens=sample.num_tokens)
        return sample

    def _path(self, leaf: int | None) -> Iterator[int]:
        """Numbers of the turns from the prompt to `leaf`; none for None or a trajectory without turns."""
        numbers = []
        while leaf is not None and leaf >= 0:
            numbers.append(leaf)
            leaf = self.turns[leaf].parent
        return reversed(numbers)

    def _prompt_of(self, path: Sequence[int]) -> Prompt:
        return (self.turns[path[0]].prompt if path else None) or self.prompt

    def _last_version(self, turn: int | None) -> WeightVersion:
        while turn is not None:
            if self.turns[turn].spans:
                return self.turns[turn].spans[-1].version
            turn = self.turns[turn].parent
        return 0

    def _add_routes(self, number: int, routes: RouteIds | None) -> None:
        """Keeps the routes that tokens of this path were generated with, and adds those of the new tokens."""
        path = list(self._path(number))
        known = next((self.turns[each].routes for each in reversed(path) if self.turns[each].routes is not None), None)
        if routes is None and known is None:
            return
        num_tokens = len(self._prompt_of(path).token_ids) + sum(len(self.turns[each].token_ids) for each in path)
        self.turns[number].routes = merge_routes(known, routes, num_tokens=num_tokens)


def _path_images(prompt: Prompt, turns: Sequence[Turn]) -> tuple[Image, ...]:
    images = prompt.images
    for turn in turns:
        images += turn.images
    return images


class _Columns(NamedTuple):
    """The response of a path: columns of R values, and its text."""

    tokens: Int32
    mask: UInt8
    logprobs: Float32
    versions: Int32
    text: str


def _turn_columns(turn: Turn) -> _Columns:
    """Columns of a path of one turn: the arrays of that turn, and a mask."""
    mask = np.empty(len(turn.token_ids), np.uint8)
    mask.fill(turn.sampled)
    return _Columns(turn.token_ids, mask, turn.logprobs, _path_versions([turn]), turn.text)


def _path_columns(turns: Sequence[Turn], is_trained: Sequence[bool]) -> _Columns:
    """Columns of any path; `is_trained` has an entry for each of its turns."""
    masks = [np.full(len(turn.token_ids), value, np.uint8) for turn, value in zip(turns, is_trained, strict=True)]
    return _Columns(
        tokens=_concatenate([turn.token_ids for turn in turns], np.int32),
        mask=_concatenate(masks, np.uint8),
        logprobs=_concatenate([turn.logprobs for turn in turns], np.float32),
        versions=_path_versions(turns),
        text="".join(turn.text for turn in turns),
    )


def _path_versions(turns: Sequence[Turn]) -> Int32:
    """Weight version of each token of a path, read-only. Usually all are equal: then they take no memory. [R]"""
    spans = turns[0].spans if len(turns) == 1 else [span for turn in turns for span in turn.spans]
    if len(spans) != 1 and len({version for version, _ in spans}) != 1:
        return _concatenate([turn.versions for turn in turns], np.int32)  # type: ignore[no-any-return]
    return _repeated(spans[0].version)[: sum([num_tokens for _, num_tokens in spans])]


@lru_cache(maxsize=64)
def _repeated(version: WeightVersion) -> Int32:
    """The version, repeated far beyond any length. A slice takes no memory and less time than `np.broadcast_to`."""
    return np.broadcast_to(np.int32(version), (2**40,))


def _last_answer(turns: Sequence[Turn]) -> dict[str, str]:
    """The entry `ANSWER` of a path with several answers; empty if the response is the answer."""
    if len(turns) == 1:  # most paths
        return {}
    texts = [turn.text for turn in turns if turn.sampled]
    # A path that was restored, or made by functions of slime's form, has no texts by turn: its answer is in the
    # metadata of its trajectory, or it is the response.
    is_known = len(texts) > 1 and any(texts[:-1])
    return {ANSWER: texts[-1]} if is_known else {}


def trajectory_from_sample(sample: Sample) -> Trajectory:
    """The trajectory of a single path. The inverse of `samples`.

    Its turns are those of the sample if they have messages, else the runs of equal loss mask.
    """
    return trajectory_from_samples([sample])


def trajectory_from_samples(samples: Sequence[Sample], *, prompt: Prompt | None = None) -> Trajectory:
    """The trajectory of some paths, which share no turn: each token is trained in the path that had it trained.

    Args:
        samples: of one trajectory, in the order of their paths.
        prompt: of the trajectory, if its paths may have other prompts; None: that of the first sample.
    """
    first = samples[0]
    trajectory = Trajectory(
        id=first.index,
        group_index=first.group_index,
        prompt=prompt or first.prompt,
        seed=first.seed,
        metadata=dict(first.metadata),
        reward=first.reward,
    )
    if len(samples) == 1 and _keeps_messages(first):
        _add_conversation(trajectory, first)
    else:
        for sample in samples:
            _add_path(trajectory, sample, keeps_empty=len(samples) > 1)
    trajectory.status, trajectory.failure = first.status, first.failure
    return trajectory


def _keeps_messages(sample: Sample) -> bool:
    """Whether the turns have messages and are those of the columns, which functions of the user may have changed."""
    sampled = np.repeat([turn.sampled for turn in sample.turns], [turn.num_tokens for turn in sample.turns])
    return any(turn.messages for turn in sample.turns) and np.array_equal(sampled, sample.loss_mask)


def _add_conversation(trajectory: Trajectory, sample: Sample) -> None:
    ids, end = sample.response_tokens, 0
    later = list(sample.images[len(sample.prompt.images) :])
    for number, known in enumerate(sample.turns):
        start, end = end, end + known.num_tokens
        trajectory.extend(
            ids[start:end],
            logprobs=sample.rollout_logprobs[start:end],
            weight_versions=sample.weight_versions[start:end],
            sampled=known.sampled,
            text=known.text,
            parent=number - 1 if number else None,
        )
        turn = trajectory.turns[number]
        turn.messages, turn.interval_s = known.messages, known.interval_s
        # The messages of an empty turn are those of its prompt, which has their images.
        num_images = len(image_digests(known.messages)) if known.num_tokens else 0
        turn.images, later = tuple(later[:num_images]), later[num_images:]
    # The texts of the turns say which is the last answer.
    trajectory.metadata.pop(ANSWER, None)
    trajectory.turns[-1].routes = sample.routes
    # Functions of the user add images without messages: all of them come before the path continues.
    trajectory.turns[0].images += tuple(later)
    _set_prompt(trajectory.turns[0], trajectory, sample)


def _set_prompt(turn: Turn, trajectory: Trajectory, sample: Sample) -> None:
    """Sets the prompt of a path in its first turn, if it is not that of the trajectory."""
    if sample.prompt != trajectory.prompt:
        turn.prompt = sample.prompt


def _add_path(trajectory: Trajectory, sample: Sample, *, keeps_empty: bool) -> None:
    # Starts of the runs: the first token, and each token whose mask differs from the one before.
    changes = np.flatnonzero(np.diff(sample.loss_mask)) + 1
    ids = sample.response_tokens
    parent: int | None = None
    # The text of a sample is not stored by turn, except for the last answer.
    ends_in_answer = len(changes) > 0 and bool(sample.loss_mask[-1]) and sample.response.endswith(sample.answer)
    before, last = ("", sample.response)
    if ends_in_answer:
        before, last = sample.response.removesuffix(sample.answer), sample.answer
    for start, end in zip([0, *changes], [*changes, len(ids)], strict=True):
        if start == end and not keeps_empty:
            return
        sampled = start < end and bool(sample.loss_mask[start])
        parent = trajectory.extend(
            ids[start:end],
            logprobs=sample.rollout_logprobs[start:end],
            weight_versions=sample.weight_versions[start:end],
            sampled=sampled,
            text=last if end == len(ids) else before if not start else "",
            parent=parent,
        )
        if not start:
            # The turns of later images are not stored: all of them come before the path continues.
            trajectory.turns[parent].images = sample.images[len(sample.prompt.images) :]
            _set_prompt(trajectory.turns[parent], trajectory, sample)
    if sample.routes is not None and parent is not None:
        trajectory.turns[parent].routes = sample.routes


def _spans(versions: Sequence[int] | Int32) -> list[WeightSpan]:
    if not isinstance(versions, np.ndarray) and len(set(versions)) == 1:  # most answers; an array costs more
        return [WeightSpan(versions[0], len(versions))]
    array = np.asarray(versions, np.int32)
    ends = [*(np.flatnonzero(np.diff(array)) + 1).tolist(), len(array)] if len(array) else []
    starts = [0, *ends[:-1]]
    return [WeightSpan(int(array[start]), end - start) for start, end in zip(starts, ends, strict=False)]


def _joined(before: Any, values: Any, dtype: Any) -> Any:
    """A new array, read-only."""
    joined = np.concatenate([before, np.asarray(values, dtype)]) if len(before) else np.array(values, dtype)
    joined.setflags(write=False)
    return joined


def _concatenate(columns: "Sequence[Int32 | Float32 | UInt8]", dtype: Any) -> Any:
    """All columns in one; a single one itself."""
    if len(columns) == 1:
        return columns[0]
    return np.concatenate(columns, dtype=dtype) if columns else np.empty(0, dtype)
