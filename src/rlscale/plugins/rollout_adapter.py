"""Rollout and eval functions in slime's form: `generate_rollout(args, rollout_id, data_source, evaluation=False)`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from inspect import isawaitable
from typing import Any, Protocol

from rlscale.plugins.args_view import Args
from rlscale.plugins.generate_adapter import TrajectorySession, add_path, call_args, document_metadata, mean_reward
from rlscale.plugins.request_recorder import RequestRecorder
from rlscale.plugins.sample_view import DocumentSample, document_status, to_document
from rlscale.plugins.slime_requests import current_session, engine_address
from rlscale.plugins.user_hook import is_finite, shown
from rlscale.trajectory import Trajectory
from rlscale.types import Group, Sample


class OpenRollout(Protocol):
    """The context of a rollout function."""

    metrics: dict[str, float]

    @property
    def session(self) -> TrajectorySession: ...

    def draw(self, number: int) -> list[Group]: ...

    def requeue(self, groups: Sequence[Group]) -> None: ...


class DocumentDataSource:
    """`data_source` of a rollout function: draws prompts, and takes groups back for a later rollout."""

    def __init__(self, context: OpenRollout, num_samples: int) -> None:
        self._context, self._num_samples = context, num_samples
        self.groups: dict[int, Group] = {}

    def get_samples(self, num_samples: int) -> list[list[DocumentSample]]:
        """The next groups, each with its pending samples."""
        drawn = self._context.draw(num_samples)
        self.groups |= {group.index: group for group in drawn}
        return [[self._to_sample(group, number) for number in range(self._num_samples)] for group in drawn]

    def add_samples(self, samples: Sequence[Sequence[DocumentSample]]) -> None:
        """Returns groups, whose prompts a later rollout draws again."""
        self._context.requeue([self.groups[_flat(group)[0].group_index or 0] for group in samples if group])

    def __call__(self, num_samples: int) -> list[list[DocumentSample]]:
        """As `get_samples`."""
        return self.get_samples(num_samples)

    def _to_sample(self, group: Group, number: int) -> DocumentSample:
        index = group.index * self._num_samples + number
        document = to_document(Sample(index=index, group_index=group.index, prompt=group.prompt, seed=0))
        document.tokens, document.loss_mask, document.rollout_log_probs = [], None, None
        return document


class DocumentRollout:
    """A rollout function in slime's form as a `RolloutFunction`."""

    def __init__(self, function: Callable[..., Any], args: Args) -> None:
        self._function, self._args = function, args

    def __call__(self, rollout_id: int, context: OpenRollout) -> list[Group]:
        """The groups that the function returned.

        Raises:
            ValueError: a sample cannot be trained on, or is not of the data source.
        """
        session = context.session
        recorder = RequestRecorder(session, only_exact=True)
        current_session.set(recorder)
        engine_address.set(session.address)
        source = DocumentDataSource(context, self._args.n_samples_per_prompt)
        found = self._function(call_args(self._args, session.address), rollout_id, source, evaluation=False)
        if isawaitable(found):
            found = asyncio.run(_result(found))
        given: Mapping[str, Any] = getattr(found, "metrics", None) or {}
        context.metrics.update({str(name): float(value) for name, value in given.items() if is_finite(value)})
        return [self._to_group(_flat(each), source, recorder) for each in getattr(found, "samples", found)]

    def _to_group(
        self, documents: list[DocumentSample], source: DocumentDataSource, recorder: RequestRecorder
    ) -> Group:
        index = documents[0].group_index if documents else None
        if index not in source.groups:
            raise ValueError(f"a rollout function must return samples of its data source, got group_index={index}")
        group = source.groups[index]
        by_trajectory: dict[int, list[DocumentSample]] = {}
        for document in documents:
            key = document.index if document.rollout_id is None else document.rollout_id
            by_trajectory.setdefault(-1 if key is None else key, []).append(document)
        samples: list[Sample] = []
        for number, paths in by_trajectory.items():
            trajectory = Trajectory(id=number, group_index=group.index, prompt=group.prompt, seed=0)
            for document in paths:
                add_path(trajectory, document, recorder)
                trajectory.metadata |= document_metadata(document, group.prompt)
            trajectory.status = document_status(paths[-1].status)
            trajectory.reward = mean_reward(paths, trajectory, key=self._args.reward_key)
            samples += trajectory.samples()
        return Group(index=group.index, prompt=group.prompt, samples=samples)


class DocumentEvaluation:
    """An eval function in slime's form as an `EvalFunction`: rewards of each set from `data`."""

    def __init__(self, function: Callable[..., Any], args: Args) -> None:
        self._function, self._args = function, args

    def __call__(self, rollout_id: int, context: OpenRollout) -> dict[str, list[float]]:
        """The rewards of each set by its name.

        Raises:
            TypeError: the function returned no sets with rewards.
        """
        session = context.session
        current_session.set(RequestRecorder(session))
        engine_address.set(session.address)
        source = DocumentDataSource(context, 1)
        found = self._function(call_args(self._args, session.address), rollout_id, source, evaluation=True)
        if isawaitable(found):
            found = asyncio.run(_result(found))
        given: Mapping[str, Any] = getattr(found, "metrics", None) or {}
        context.metrics.update({str(name): float(value) for name, value in given.items() if is_finite(value)})
        data = getattr(found, "data", found)
        if not isinstance(data, Mapping) or not all(
            isinstance(each, Mapping) and "rewards" in each for each in data.values()
        ):
            raise TypeError(f"an eval function must return sets with rewards, got {shown(data)}")
        return {str(name): list(each["rewards"]) for name, each in data.items()}


def _flat(group: Any) -> list[DocumentSample]:
    """The samples of a group, which may have a list for each trajectory."""
    return [sample for each in group for sample in (each if isinstance(each, list | tuple) else [each])]


async def _result(found: Any) -> Any:
    return await found
