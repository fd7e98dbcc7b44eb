"""Trajectories with tools that several rollouts continue equal those of one rollout, token for token."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlscale.agents.tool_agent import ToolAgent
from rlscale.agents.tool_pool import Owner, ToolBox, ToolResult
from rlscale.checkpoint.pending_groups import load_groups, save_groups
from rlscale.config.groups.agent import AgentConfig
from rlscale.rollout.generate_session import GenerateSession
from rlscale.trajectory import CONTINUED, RESTARTED, Trajectory, trajectory_from_samples
from rlscale.types import ANSWER, Generation, Group, Sample, SampleStatus, SamplingParams
from tests.scripted_policy import ASSISTANT, END, CharacterRenderer, encode, new_trajectory, open_session

NEVER = 10**6


class Script:
    """A policy and its tool: answer i of a script after i answers; each rollout aborts after its number of tokens."""

    keeps_state = False

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers, self.num_calls, self.left, self.version = answers, 0, NEVER, 1
        self.stops_in_call = NEVER
        self.session: GenerateSession | None = None
        self.specs = [{"type": "function", "function": {"name": "get"}}]

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, n: int, **options: Any
    ) -> list[Generation]:
        ids = list(token_ids)
        begin = len(ids) - ids[::-1].index(ASSISTANT)
        done = ids.count(ASSISTANT) - 1
        answer = [6 if each == 16 else each for each in encode(self._answers[done])] + [END]
        rest = answer[len(ids) - begin :]
        made = rest[: min(params.max_new_tokens, self.left)]
        self.left -= len(made)
        reason = "stop" if made == rest else "length" if len(made) == params.max_new_tokens else "abort"
        places = range(len(ids), len(ids) + len(made))
        return [
            Generation(
                output_ids=made,
                logprobs=[-each / 128 for each in places],
                weight_versions=[self.version] * len(made),
                finish_reason=reason,
                text="".join(map(chr, made)),
                engine="scripted",
            )
        ] * n

    async def call(self, name: str, arguments: str, owner: Owner) -> ToolResult:
        self.num_calls += 1
        if self.num_calls == self.stops_in_call:
            assert self.session is not None
            self.session.stopped.set()
        return ToolResult(text=f"{name} {arguments}"[:9], is_rejected=len(arguments) > 3)

    async def release(self, owner: Owner) -> None: ...

    async def close(self, *, wait: bool) -> None: ...


async def run_rollouts(script: Script, cuts: Sequence[int], *, limit: int, max_turns: int, checkpoints: bool) -> Sample:
    """The sample of a trajectory; every rollout but the last aborts it after so many tokens."""
    config = AgentConfig(tools=["a:b"], max_turns=max_turns)
    agent = ToolAgent(ToolBox([script], config), CharacterRenderer(), config)
    trajectory = new_trajectory()
    row = trajectory.prompt
    for number, cut in enumerate([*cuts, NEVER]):
        script.left, script.version = cut, 1 + number
        session: GenerateSession = open_session(script, max_new_tokens=limit)  # type: ignore[arg-type]
        script.session = session
        failure = await agent(trajectory, session)
        trajectory.failure = failure
        (sample,) = trajectory.samples()
        if sample.status != SampleStatus.aborted:
            return sample
        trajectory = continued(sample, row, through_a_checkpoint=checkpoints)
    raise AssertionError("the last rollout has no limit")


def continued(sample: Sample, row: Any, *, through_a_checkpoint: bool) -> Trajectory:
    if through_a_checkpoint:
        with tempfile.TemporaryDirectory() as folder:
            save_groups(Path(folder), [Group(index=0, prompt=row, samples=[sample])])
            (group,) = load_groups(Path(folder))
        (sample,) = group.samples
    return trajectory_from_samples([sample], prompt=row)


answers = st.lists(st.text("abc\x06 ", max_size=12), min_size=8, max_size=8)


@given(
    answers=answers,
    cuts=st.lists(st.integers(0, 15), max_size=6),
    stops_in_call=st.sampled_from([1, 2, 3, NEVER]),
    limit=st.integers(1, 80),
    max_turns=st.integers(1, 6),
    checkpoints=st.booleans(),
)
@pytest.mark.slow
def test_a_continued_trajectory_equals_an_uninterrupted_one(
    answers: list[str], cuts: list[int], stops_in_call: int, limit: int, max_turns: int, checkpoints: bool
) -> None:
    whole, parts = Script(answers), Script(answers)
    expected = asyncio.run(run_rollouts(whole, [], limit=limit, max_turns=max_turns, checkpoints=False))
    parts.stops_in_call = stops_in_call
    cuts = [*cuts, NEVER] if stops_in_call != NEVER else cuts
    found = asyncio.run(run_rollouts(parts, cuts, limit=limit, max_turns=max_turns, checkpoints=checkpoints))
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.loss_mask.tolist() == expected.loss_mask.tolist()
    assert found.rollout_logprobs.tolist() == expected.rollout_logprobs.tolist()
    assert (found.response, found.answer, found.prompt) == (expected.response, expected.answer, expected.prompt)
    assert (found.status, found.failure) == (expected.status, expected.failure)
    metadata = dict(found.metadata)
    assert metadata.pop(CONTINUED, 0) <= len(cuts) and RESTARTED not in metadata
    assert metadata == expected.metadata
    assert [turn._replace(interval_s=None) for turn in found.turns] == [
        turn._replace(interval_s=None) for turn in expected.turns
    ]
    # No tool is called twice, and versions only grow.
    assert parts.num_calls == whole.num_calls
    sampled = found.weight_versions[found.loss_mask.astype(bool)]
    assert (np.diff(sampled) >= 0).all()
    assert ANSWER in metadata or sum(turn.sampled for turn in found.turns) <= 1 or not expected.response
