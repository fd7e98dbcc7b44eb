"""Source of rollouts that are read from files: `debug.load_rollout_data`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlscale.errors import DataError
from rlscale.expert_routes import RouteIds
from rlscale.images import Image
from rlscale.observe.dump_parts import read_images, read_routes
from rlscale.observe.dumps import read_dump
from rlscale.rollout.fixed_rollouts import FixedRollouts
from rlscale.types import Failure, FailureCause, Group, Prompt, Sample, SampleStatus, WeightVersion


class ReplayedRollouts(FixedRollouts):
    """Reads the groups that `debug.save_rollout_data` wrote, with their rewards and rollout logprobs.

    Their tokens count as made by the weights that train on them: a file may be from another run. Samples that failed
    stay out of batch and baseline.

    Args:
        template: path with `{rollout_id}` in it.
        has_routes: the samples must have the expert routes of their engine.
        has_images: the model reads images; those of the samples are in the files.
    """

    has_rewards = True

    def __init__(self, template: str, *, has_routes: bool = False, has_images: bool = False) -> None:
        self._template, self._has_routes, self._has_images = template, has_routes, has_images
        self._groups: dict[int, Group] = {}

    def next_prompts(self, rollout_id: int, number: int | None = None) -> list[tuple[int, Prompt]]:
        """The prompts of the rollout's file, each with the index of its group.

        Raises:
            DataError: the file is missing or has other contents.
        """
        path = Path(self._template.replace("{rollout_id}", str(rollout_id)))
        try:
            records = read_dump(path)
        except OSError as error:
            raise DataError(
                f"{path} must contain rollout {rollout_id} for debug.load_rollout_data, got {error}; set "
                "data.num_rollout to the number of saved rollouts"
            ) from error
        # One rollout at a time: `group` finds those of the last call.
        self._groups = {}
        routes = read_routes(path) if self._has_routes else {}
        if self._has_routes and not routes:
            raise DataError(
                f"{path} must have a file of routes next to it with algo.use_rollout_routing_replay, got none; write "
                "the dump again in a run with that key"
            )
        images = read_images(path) if self._has_images else {}
        for row, record in enumerate(records, start=1):
            try:
                self._add(record, routes.get(row - 1), images.get(row - 1, ()))
            except (KeyError, TypeError, ValueError) as error:
                cause = f"{type(error).__name__}: {error}"
                raise DataError(f"{path}, row {row} must be a sample, got {cause}; write the dump again") from error
        self._groups = {index: group for index, group in self._groups.items() if group.samples}
        if not self._groups:
            raise DataError(
                f"{path} must contain at least one sample that did not fail, got none; write the dump again"
            )
        return [(index, group.prompt) for index, group in self._groups.items()]

    def trajectory_ids(self, index: int) -> Sequence[int]:
        """The trajectories of the group in the file."""
        group = self._groups[index]
        return sorted({sample.index for sample in (*group.samples, *group.failed)})

    async def group(
        self,
        index: int,
        prompt: Prompt,
        *,
        oldest: WeightVersion,
        newest: WeightVersion | None,
        before: Group | None = None,
    ) -> Group:
        """The group from the file; its tokens count as made by the weights `oldest`."""
        group = self._groups[index]
        for sample in group.samples:
            sample.weight_versions = np.full(sample.response_len, oldest, np.int32)
        return group

    def state_dict(self) -> dict[str, Any]:
        """Empty: the number of the rollout is the position."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Does nothing."""

    def _add(self, record: Mapping[str, Any], routes: RouteIds | None, images: tuple[Image, ...]) -> None:
        tokens, mask = list(record["tokens"]), list(record["loss_mask"])
        # The mask covers the response only; `tokens` is the prompt and the response.
        num_prompt_tokens = len(tokens) - len(mask)
        index = int(record["group_index"])
        # A sample of a user's generate function may have another prompt.
        prompt = Prompt(
            index=int(record["prompt_index"]),
            text=record["prompt"],
            token_ids=tuple(tokens[:num_prompt_tokens]),
            label=record["label"],
        )
        if index not in self._groups:
            self._groups[index] = Group(index=index, prompt=prompt, samples=[])
        group = self._groups[index]
        sample = Sample(
            index=int(record["sample_index"]),
            group_index=index,
            prompt=prompt,
            seed=int(record["seed"]),
            path=int(record.get("path", 0)),
            response=record["response"],
            status=SampleStatus(record["status"]),
            reward=None if record["reward"] is None else float(record["reward"]),
            failure=_failure(record),
            metadata=dict(record["metadata"]),
            response_tokens=np.asarray(tokens[num_prompt_tokens:], np.int32),
            loss_mask=np.asarray(mask, np.uint8),
            rollout_logprobs=np.asarray(record["rollout_logprobs"], np.float32),
            weight_versions=np.zeros(len(mask), np.int32),
            images=images,
        )
        if len(sample.rollout_logprobs) != len(mask):
            raise ValueError(f"rollout_logprobs must have {len(mask)} entries, got {len(sample.rollout_logprobs)}")
        if routes is not None:
            if len(routes) != len(tokens):
                raise ValueError(f"routes must cover {len(tokens)} tokens, got {len(routes)}")
            sample.routes = routes
        (group.failed if sample.status == SampleStatus.failed else group.samples).append(sample)


def _failure(record: Mapping[str, Any]) -> Failure | None:
    failure = record.get("failure")
    return None if failure is None else Failure(cause=FailureCause(failure["cause"]), message=str(failure["message"]))
