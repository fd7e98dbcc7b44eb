"""Trees of conversations: every token that an engine saw or sampled is in the trajectory, and trained at most once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.models.agent_tokenizer import agent_tokenizer
from rlscale.renderers.answer_parser import COMPACT, HERMES
from rlscale.renderers.conversation_tree import CONVERSATIONS, FORKS, ConversationTree
from rlscale.renderers.renderer import Renderer
from rlscale.renderers.template_renderer import TemplateRenderer
from rlscale.trajectory import Trajectory
from rlscale.types import Generation, Prompt
from tests.family_tokenizers import family_tokenizer

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}},)
RENDERERS: dict[str, Renderer] = {
    "agent": TemplateRenderer(agent_tokenizer(4096), COMPACT, name="agent"),
    "rewrites": TemplateRenderer(family_tokenizer("forgetful"), HERMES, name="rewrites"),
}
NO_BRIDGE = TemplateRenderer(family_tokenizer("looks_back"), HERMES, name="no bridge")

answers = st.lists(st.integers(5, 104), max_size=12)
texts = st.text(alphabet="ab <|>{}\n", max_size=8)
additions = st.lists(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool"]), texts),
    min_size=1,
    max_size=3,
)


class Log:
    """An engine's own log: ids of the requests, and what it sampled."""

    def __init__(self, renderer: Renderer, system: str | None = None) -> None:
        self.trajectory = Trajectory(id=1, group_index=0, prompt=Prompt(index=0, token_ids=(), text=""), seed=0)
        self.tree, self.renderer = ConversationTree(self.trajectory, renderer), renderer
        self.calls: list[tuple[list[int], list[int]]] = []

    def call(self, messages: Sequence[Any], sampled: Sequence[int], *, stops: bool = True) -> dict[str, Any]:
        request = self.tree.prepare(messages, TOOLS if self.renderer is RENDERERS["agent"] else ())
        return self.answer(request, sampled, stops=stops)

    def answer(self, request: Any, sampled: Sequence[int], *, stops: bool = True) -> dict[str, Any]:
        ids = [each for each in sampled if each not in self.renderer.stop_ids]
        ids += [self.renderer.stop_ids[0]] if stops or not ids else []
        self.calls.append((list(request.token_ids), ids))
        generation = Generation(
            text="",
            output_ids=ids,
            engine="log",
            logprobs=[-1.0 - len(self.calls)] * len(ids),
            finish_reason="stop" if stops else "length",
            weight_versions=[0] * len(ids),
        )
        return self.tree.add(request, generation).to_message()

    def check(self) -> None:
        """Each call is a path of the trajectory, token for token, and each sampled token is trained once."""
        samples = self.trajectory.samples()
        paths = [sample.tokens.tolist() for sample in samples]
        for prompt, sampled in self.calls:
            assert any(path[: len(prompt) + len(sampled)] == prompt + sampled for path in paths)
        trained = sum(int(sample.loss_mask.sum()) for sample in samples)
        assert trained == sum(len(sampled) for _, sampled in self.calls)
        for sample in samples:
            logprobs, mask = sample.rollout_logprobs, np.asarray(sample.loss_mask, bool)
            assert (logprobs[mask] < 0).all(), "a given token is never trained"


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(RENDERERS)),
    turns=st.lists(st.tuples(additions, answers, st.booleans()), min_size=1, max_size=6),
    echo=st.sampled_from(["same", "bare", "extra"]),
)
@pytest.mark.slow
def test_an_append_only_history_is_one_path(
    name: str, turns: list[tuple[list[dict[str, str]], list[int], bool]], echo: str
) -> None:
    log = Log(RENDERERS[name])
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be short."}]
    for number, (new, sampled, stops) in enumerate(turns):
        # An answer of the tool role needs a call before it only in templates that are not tested here.
        messages += [{**message, "tool_call_id": f"call_{number}"} for message in new]
        message = log.call(messages, sampled, stops=stops)
        if echo == "bare":
            message = {key: value for key, value in message.items() if key != "reasoning_content"}
        messages.append({**message, "refusal": None} if echo == "extra" else message)
    log.check()
    assert log.trajectory.metadata == {FORKS: 0, CONVERSATIONS: 1}
    (sample,) = log.trajectory.samples()
    assert sample.tokens.tolist() == log.calls[-1][0] + log.calls[-1][1]


@settings(max_examples=30, deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(0, 5), additions, answers), min_size=1, max_size=8),
    name=st.sampled_from(sorted(RENDERERS)),
)
def test_any_continued_history_gives_a_tree_without_forks(
    turns: list[tuple[int, list[dict[str, str]], list[int]]], name: str
) -> None:
    log = Log(RENDERERS[name])
    histories: list[list[dict[str, Any]]] = [[]]
    for start, new, sampled in turns:
        messages = [*histories[start % len(histories)], *({**message, "tool_call_id": "a"} for message in new)]
        histories.append([*messages, log.call(messages, sampled)])
    log.check()
    assert log.trajectory.metadata[FORKS] == 0


@settings(max_examples=20, deadline=None)
@given(turns=st.lists(answers, min_size=2, max_size=5))
def test_a_template_without_bridge_forks_visibly(turns: list[list[int]]) -> None:
    log = Log(NO_BRIDGE)
    messages: list[dict[str, Any]] = []
    for number, sampled in enumerate(turns):
        messages.append({"role": "user", "content": f"{number}"})
        messages.append(log.call(messages, sampled))
    log.check()
    assert log.trajectory.metadata == {FORKS: len(turns) - 1, CONVERSATIONS: len(turns)}


@pytest.fixture
def log() -> Log:
    return Log(RENDERERS["agent"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_sub_agents_are_conversations_of_one_trajectory(log: Log) -> None:
    main = [{"role": "system", "content": "Plan."}, user("1+2=")]
    main.append(log.call(main, [30, 31]))
    helper = [{"role": "system", "content": "Add."}, user("1+2=")]
    for _ in range(2):
        helper.append(log.call(helper, [40]))
        helper.append(user("again"))
    log.call([*main, user("and now?")], [50])
    log.check()
    assert log.trajectory.metadata == {FORKS: 0, CONVERSATIONS: 2}
    assert len(log.trajectory.samples()) == 2


def test_a_compacted_context_is_a_new_conversation(log: Log) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Plan."}, user("long question")]
    messages += [log.call(messages, [30]), user("more")]
    log.call(messages, [31])
    compacted = [messages[0], user("Summary: they asked and we answered.")]
    compacted += [log.call(compacted, [32]), user("so?")]
    log.call(compacted, [33])
    log.check()
    assert log.trajectory.metadata == {FORKS: 0, CONVERSATIONS: 2}


def test_a_changed_answer_is_a_fork_and_is_not_trained(log: Log) -> None:
    messages = [user("a")]
    answer = log.call(messages, [30])
    messages = [*messages, answer, user("b")]
    log.call(messages, [31])
    log.call([*messages, {"role": "assistant", "content": "rewritten"}, user("c")], [32])
    log.check()
    assert log.trajectory.metadata == {FORKS: 1, CONVERSATIONS: 2}


def test_concurrent_requests_and_n_answers_are_branches(log: Log) -> None:
    first = log.tree.prepare([user("a")], TOOLS)
    second = log.tree.prepare([user("a")], TOOLS)
    answers = [log.answer(first, [30]), log.answer(first, [31]), log.answer(second, [30])]
    requests = [log.tree.prepare([user("a"), answer, user("b")], TOOLS) for answer in answers]
    for request in reversed(requests):
        log.answer(request, [40])
    log.check()
    assert log.trajectory.metadata == {FORKS: 0, CONVERSATIONS: 1}
    # The first and the third answer are equal, so that the newest of them is continued twice.
    assert len(log.trajectory.samples()) == 4


def test_a_repeated_request_and_one_that_fails(log: Log) -> None:
    log.tree.prepare([user("a")], TOOLS)
    assert log.trajectory.turns == [] and log.trajectory.metadata == {FORKS: 0, CONVERSATIONS: 0}
    answer = log.call([user("a")], [30])
    messages = [user("a"), answer, user("b")]
    for sampled in ([31], [32]):
        log.call(messages, sampled)
    log.check()
    given = [turn for turn in log.trajectory.turns if not turn.sampled and len(turn.token_ids)]
    assert len(given) == 1, "the repeated user's message is in the tree once"


def test_messages_changed_in_place_are_other_messages(log: Log) -> None:
    calls = [{"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    messages: list[dict[str, Any]] = [user("a"), {"role": "assistant", "content": "", "tool_calls": calls}, user("b")]
    answer = log.call(messages, [30])
    calls[0]["function"]["arguments"] = {"a": 2}  # type: ignore[index]
    log.call([*messages, answer, user("c")], [31])
    log.check()
    assert log.trajectory.metadata[CONVERSATIONS] == 2


def test_other_tools_are_another_conversation(log: Log) -> None:
    answer = log.call([user("a")], [30])
    request = log.tree.prepare([user("a"), answer, user("b")])
    assert request.parent is None and not request.is_fork


def test_ids_are_kept_at_the_ends_of_paths_only(log: Log) -> None:
    messages = [user("a")]
    for _ in range(5):
        messages += [log.call(messages, [30]), user("b")]
    nodes, kept = [root for _, root in log.tree._history._roots], 0
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        kept += node.ids is not None
    assert kept == 1
