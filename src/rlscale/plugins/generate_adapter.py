"""Generate functions in slime's form, `generate(args, sample, sampling_params)`, as those of rlscale."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from inspect import isawaitable, iscoroutinefunction, signature
from typing import Any, Protocol

import numpy as np

from rlscale.config.slime_modules import VARIABLE
from rlscale.plugins.args_view import Args, WritableArgs
from rlscale.plugins.daemon_call import call_in_daemon
from rlscale.plugins.request_recorder import RecordedRequest, RequestRecorder
from rlscale.plugins.sample_view import (
    ATTRIBUTES,
    DocumentSample,
    document_status,
    to_document,
)
from rlscale.plugins.slime_requests import OpenSession, current_session, engine_address, to_document_params
from rlscale.plugins.user_hook import is_finite, shown
from rlscale.trajectory import ENDS, Trajectory
from rlscale.types import Prompt, SampleStatus, WeightVersion

_FIELDS = frozenset(field.name for field in fields(DocumentSample))


class TrajectorySession(OpenSession, Protocol):
    """Session of a call of a generate function."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of an engine, for `args`."""
        ...

    @property
    def oldest_version(self) -> WeightVersion:
        """Version of the oldest weights that the engines may have."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether the rollout has ended."""
        ...

    @property
    def is_evaluation(self) -> bool:
        """Whether the trajectory is part of an evaluation."""
        ...


class DocumentGenerate:
    """`generate(args, sample, sampling_params)`, plain or async, as a generate function of rlscale.

    It returns a sample or a list of samples, which become the paths of the trajectory; each may have another
    prompt. `post` to the engines of `args` records which weights made which tokens. A sampled token is trained once, in
    the first sample that has it. Rewards that the function sets stay: that of the trajectory is the mean over its
    samples. A plain function runs in its own thread.
    """

    def __init__(self, function: Callable[..., Any], args: Args) -> None:
        self.func = function
        self._args = args

    async def __call__(self, trajectory: Trajectory, session: TrajectorySession) -> None:
        """Adds turns, status, metadata and maybe the reward to the trajectory.

        Raises:
            ValueError: the function returned something that cannot be trained on.
        """
        recorder = RequestRecorder(session)
        current_session.set(recorder)
        engine_address.set(session.address)
        found = await self._call(trajectory, session)
        documents = found if isinstance(found, list | tuple) else [found]
        if not documents or not all(isinstance(each, DocumentSample) for each in documents):
            names = ", ".join(type(each).__name__ for each in documents) or "an empty list"
            raise ValueError(f"a generate function must return a sample or a list of samples, got {names}")
        status = _end_status(documents, recorder.requests, is_stopped=session.is_stopped)
        is_continued = status == SampleStatus.aborted and bool(self._args.partial_rollout) and len(documents) == 1
        trajectory.turns = []
        if status != SampleStatus.aborted or is_continued:
            for document in documents:
                add_path(trajectory, document, recorder)
        trajectory.status = status
        trajectory.reward = None
        if status != SampleStatus.aborted:
            trajectory.reward = mean_reward(documents, trajectory, key=self._args.reward_key)
        for document in documents:
            trajectory.metadata |= document_metadata(document, trajectory.prompt)

    async def _call(self, trajectory: Trajectory, session: TrajectorySession) -> Any:
        args = call_args(self._args, session.address)
        arguments = (args, _to_sample(trajectory), to_document_params(session.params))
        function = _with_evaluation(self.func, session.is_evaluation)
        if not iscoroutinefunction(getattr(self.func, "func", self.func)):
            return await call_in_daemon(function, *arguments)
        found = function(*arguments)
        return await found if isawaitable(found) else found


def call_args(args: Args, address: tuple[str, int]) -> Args:
    """`args` of one call, with the address of the engines. It is writable with `run.slime_modules`."""
    args = _args_at(args, address)
    return WritableArgs(args) if os.environ.get(VARIABLE) else args


def _args_at(args: Args, address: tuple[str, int]) -> Args:
    key = (id(args), address)
    if key not in _KNOWN_ARGS:
        host, port = address
        # `args` is kept, too: the id of a deleted object is used again.
        _KNOWN_ARGS[key] = args, args.with_runtime({"sglang_router_ip": host, "sglang_router_port": port})
    return _KNOWN_ARGS[key][1]


_KNOWN_ARGS: dict[tuple[int, tuple[str, int]], tuple[Args, Args]] = {}


def mean_reward(documents: Sequence[DocumentSample], trajectory: Trajectory, *, key: str | None) -> float | None:
    """The mean reward of the samples of a trajectory; None: the function graded none of them.

    Raises:
        ValueError: some have no finite reward.
    """
    given = [document.reward for document in documents if document.reward is not None]
    if not given:
        return None
    if isinstance(given[-1], Mapping):
        trajectory.metadata["rewards"] = {str(name): value for name, value in given[-1].items()}
        given = [each.get(key, each) if isinstance(each, Mapping) else each for each in given]
    if len(given) < len(documents) or not all(is_finite(value) for value in given):
        raise ValueError(
            f"the function must set finite rewards on all samples of a trajectory or on none, got {shown(given[:8])} "
            f"on {len(given)} of {len(documents)}"
        )
    return sum(float(value) for value in given) / len(given)


def document_metadata(document: DocumentSample, prompt: Prompt) -> dict[str, Any]:
    """Entries that a function added to `metadata`, and its further attributes, which a reward sees again."""
    row = prompt.metadata
    found = {name: value for name, value in document.metadata.items() if name not in row or row[name] != value}
    further = {name: value for name, value in vars(document).items() if name not in _FIELDS and _is_json(value)}
    return found | ({ATTRIBUTES: further} if further else {})


def _to_sample(trajectory: Trajectory) -> DocumentSample:
    """The sample that a function gets: empty, or with the tokens of an aborted attempt."""
    if trajectory.turns:
        (sample, *_) = trajectory.samples()
        document = to_document(sample)
        document.prompt = trajectory.prompt.text
        return document
    return DocumentSample(
        group_index=trajectory.group_index,
        index=trajectory.id,
        rollout_id=trajectory.id,
        prompt=trajectory.prompt.text,
        label=trajectory.prompt.label,
        metadata=dict(trajectory.prompt.metadata),
    )


def _end_status(
    documents: Sequence[DocumentSample], requests: Sequence[RecordedRequest], *, is_stopped: bool
) -> SampleStatus:
    reasons = [request.answer.finish_reason for request in requests]
    statuses = [document_status(document.status) for document in documents]
    if SampleStatus.failed in statuses:
        raise ValueError("the function returned a sample with the status failed")
    was_aborted = "abort" in reasons and (is_stopped or reasons[-1] == "abort")
    if was_aborted or SampleStatus.aborted in statuses:
        return SampleStatus.aborted
    if statuses[-1] != SampleStatus.pending:
        return statuses[-1]
    if not reasons:
        raise ValueError("the function must set sample.status, or send its requests by post, got a pending sample")
    return ENDS[reasons[-1]]


def add_path(trajectory: Trajectory, document: DocumentSample, recorder: RequestRecorder) -> None:
    """Adds the turns of one sample: one for each run of equal loss mask.

    Raises:
        ValueError: its columns do not fit each other, or a trainable token has no logprob.
    """
    oldest = recorder.oldest_version
    tokens, mask = _checked_columns(document)
    num_prompt = len(tokens) - len(mask)
    logprobs, versions = np.full(len(tokens), np.nan, np.float32), np.full(len(tokens), -1, np.int32)
    if document.rollout_log_probs is not None:
        logprobs[num_prompt:] = document.rollout_log_probs
    elsewhere = _version_of(document, oldest)
    versions[num_prompt:] = elsewhere
    is_trained = np.concatenate([np.zeros(num_prompt, bool), np.asarray(mask, bool)])
    for start, number, request, is_exact in recorder.place(tokens):
        span = slice(max(start, num_prompt), start + number)
        if span.start >= span.stop:
            continue
        offset = span.start - start
        versions[span] = request.answer.weight_versions[offset:number]
        if document.rollout_log_probs is None:
            logprobs[span] = request.answer.logprobs[offset:number]
        if request.is_used and is_exact:
            is_trained[span] = False
        request.is_used |= bool(is_trained[span].any())
    if np.isnan(logprobs[is_trained]).any():
        raise ValueError(
            "a generate function must set rollout_log_probs of trainable tokens, got tokens that no request returned; "
            "use the tokens and logprobs of the answers, or set their loss_mask to 0"
        )
    _extend_trajectory(
        trajectory, document, is_trained[num_prompt:], tokens=tokens, logprobs=logprobs, versions=versions
    )


def _extend_trajectory(trajectory: Trajectory, document: DocumentSample, trained: Any, **columns: Any) -> None:
    tokens, num_prompt = np.asarray(columns["tokens"], np.int32), len(columns["tokens"]) - len(trained)
    starts = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist()]
    parent: int | None = None
    for start, end in zip(starts, [*starts[1:], len(trained)], strict=True):
        span, sampled = slice(num_prompt + start, num_prompt + end), bool(len(trained)) and bool(trained[start])
        parent = trajectory.extend(
            tokens[span],
            logprobs=columns["logprobs"][span] if sampled else None,
            weight_versions=columns["versions"][span] if sampled else None,
            sampled=sampled,
            text=document.response if end == len(trained) else "",
            parent=parent,
        )
        if not start:
            trajectory.turns[parent].prompt = _own_prompt(trajectory.prompt, document, tokens[:num_prompt])


def _checked_columns(document: DocumentSample) -> tuple[list[int], list[int]]:
    """Tokens of prompt and response, and the mask of the response."""
    tokens, length = [int(token) for token in document.tokens], document.response_length
    if not 0 <= length < len(tokens):
        rule = "a generate function must return the tokens of prompt and response, and a smaller response_length"
        raise ValueError(f"{rule}, got {len(tokens)} tokens and response_length={length}")
    mask = [1] * length if document.loss_mask is None else [int(value) for value in document.loss_mask]
    if len(mask) != length or not set(mask) <= {0, 1}:
        raise ValueError(f"loss_mask must be {length} values of 0 or 1, got {len(mask)}: {mask[:8]}")
    known = document.rollout_log_probs
    if known is not None and len(known) != length:
        raise ValueError(f"rollout_log_probs must be {length} numbers, one for each token, got {len(known)}")
    return tokens, [0] * length if document.remove_sample else mask


def _own_prompt(prompt: Prompt, document: DocumentSample, token_ids: Any) -> Prompt | None:
    ids = tuple(token_ids.tolist())
    if ids == prompt.token_ids:
        return None
    text = document.prompt if isinstance(document.prompt, str) else prompt.text
    return replace(prompt, token_ids=ids, text=text)


def _version_of(document: DocumentSample, oldest: WeightVersion) -> WeightVersion:
    """The version of tokens that no recorded request made, e.g. those of the function's own HTTP client."""
    known = [int(version) for version in document.weight_versions if str(version).isdigit()]
    # The oldest one is on the safe side: the age of a token is never underestimated.
    return max(oldest, min(known)) if known else oldest


def _with_evaluation(function: Callable[..., Any], is_evaluation: bool) -> Callable[..., Any]:
    """The function with its parameter `evaluation` bound, if it has one."""
    try:
        takes_it = "evaluation" in signature(function).parameters
    except (TypeError, ValueError):  # some C functions have no signature
        takes_it = False
    return (lambda *arguments: function(*arguments, evaluation=is_evaluation)) if takes_it else function


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
