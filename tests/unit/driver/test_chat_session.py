"""A conversation with a policy, with an engine that answers by a script."""

from collections.abc import AsyncIterator, Callable

from rlscale.agents.tool_pool import ToolBox
from rlscale.config.groups.agent import AgentConfig
from rlscale.driver.chat_session import ChatModel, ChatSession
from rlscale.engines.server.generate_request import Answer, GenerateRequest
from rlscale.types import SamplingParams
from tests.scripted_policy import CharacterRenderer, decode, encode
from tests.unit.agents.test_tool_agent import LocalTools, add_numbers

END = 1


class ScriptedEngine:
    """Streams the text that `policy` returns for the text of a request, two tokens at a time."""

    def __init__(self, policy: Callable[[str], str], *, reason: str = "stop") -> None:
        self._policy, self._reason, self.requests = policy, reason, list[GenerateRequest]()

    async def stream(self, request: GenerateRequest) -> AsyncIterator[tuple[int, Answer]]:
        self.requests.append(request)
        ids = [*encode(self._policy(decode(request.input_ids))), END]
        for end in range(2, len(ids) + 2, 2):
            reason = {"type": self._reason} if end >= len(ids) else None
            yield 0, Answer(output_ids=ids[:end], logprobs=[], spans=[], finish_reason=reason, weight_version="0")


def session_of(
    engine: ScriptedEngine, *, max_context_len: int = 1000, tools: bool = False, raw: bool = False
) -> ChatSession:
    box = ToolBox([LocalTools({"add": add_numbers})], AgentConfig(tools=["a:b"])) if tools else None
    return ChatSession(
        ChatModel(
            service=engine,
            encode=encode,
            decode=decode,
            renderer=None if raw else CharacterRenderer(),
            max_context_len=max_context_len,
            max_turns=3,
            box=box,
            params=SamplingParams(max_new_tokens=50),
        )
    )


async def events(session: ChatSession, text: str) -> list[tuple[str, str]]:
    return [(str(event.kind), event.text) async for event in session.send(text)]


async def test_an_answer_is_streamed_and_its_tokens_are_kept() -> None:
    engine = ScriptedEngine(lambda text: "hello")
    session = session_of(engine)
    assert await events(session, "hi") == [("text", "he"), ("text", "ll"), ("text", "o"), ("end", "")]
    await events(session, "again")
    first, second = (request.input_ids for request in engine.requests)
    assert list(second) == [
        *first,
        *encode("hello"),
        END,
        *CharacterRenderer().render([{"role": "user", "content": "again"}]),
    ]
    assert engine.requests[0].params.stop_token_ids == (END,)
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2


async def test_calls_of_tools_and_their_results_are_shown() -> None:
    def policy(text: str) -> str:
        return "It is 3." if text.endswith("3\x04") else 'I add.\x06add {"a": 1, "b": 2}'

    found = await events(session_of(ScriptedEngine(policy), tools=True), "1+2?")
    assert [each for each in found if each[0] in ("call", "result")] == [
        ("call", 'add({"a": 1, "b": 2})'),
        ("result", "3"),
    ]
    # The call is not shown as text, too.
    assert "".join(text for kind, text in found if kind == "text") == "I add.It is 3."


async def test_a_call_that_cannot_be_parsed_is_text() -> None:
    found = await events(session_of(ScriptedEngine(lambda text: "sum\x06 1"), tools=True), "1+2?")
    assert "".join(text for kind, text in found if kind == "text") == "sum\x06 1"
    assert found[-1] == ("note", "a tool call could not be parsed: a call must have a name")


async def test_endless_calls_end() -> None:
    found = await events(session_of(ScriptedEngine(lambda text: '\x06add {"a": 1, "b": 2}'), tools=True), "1+2?")
    assert found[-1] == ("note", "the policy called tools 3 times without an answer")


async def test_reset_and_system_forget_messages() -> None:
    engine = ScriptedEngine(lambda text: "yes")
    session = session_of(engine)
    await events(session, "one")
    session.set_system("Be brief.")
    await events(session, "two")
    session.reset()
    await events(session, "three")
    texts = [decode(request.input_ids) for request in engine.requests]
    assert texts == ["\x03one\x04", "\x02Be brief.\x03two\x04", "\x02Be brief.\x03three\x04"]


async def test_a_full_conversation_is_a_note_and_the_message_is_not_kept() -> None:
    engine = ScriptedEngine(lambda text: "yes")
    session = session_of(engine, max_context_len=20)
    assert (await events(session, "x" * 30))[0][1].startswith("the conversation fills the 20 tokens of the model")
    assert engine.requests == [] and session.messages == []
    await events(session, "x" * 10)
    assert engine.requests[0].params.max_new_tokens == 8


async def test_a_cut_answer_is_a_note() -> None:
    found = await events(session_of(ScriptedEngine(lambda text: "yes", reason="length")), "hi")
    assert found[-1] == ("note", "cut after 4 tokens; --max-tokens sets the limit")


async def test_without_a_chat_template_each_message_is_a_prompt() -> None:
    engine = ScriptedEngine(lambda text: "3")
    session = session_of(engine, raw=True)
    await events(session, "1+2=")
    await events(session, "1+3=")
    assert [decode(request.input_ids) for request in engine.requests] == ["1+2=", "1+3="]
