"""A policy that answers by a script, and a renderer whose tokens are characters: agents without a model."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from rlscale.renderers.conversation_tree import message_text
from rlscale.renderers.renderer import Message, ParsedAnswer, ToolCall, ToolSpec
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import GenerateSession
from rlscale.trajectory import Trajectory
from rlscale.types import Generation, Prompt, SamplingParams

END, SYSTEM, USER, ASSISTANT, TOOL, CALL = 1, 2, 3, 4, 5, 6
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


class CharacterRenderer:
    """One token for each character and role; a call is `CALL name arguments`."""

    name, stop_ids, prefix_stable = "characters", (END,), True

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        ids = encode("".join(each["function"]["name"] + " " for each in tools))
        for message in messages:
            ids += [ROLES[message["role"]], *encode(message_text(message.get("content")))]
            for call in message.get("tool_calls", ()):
                ids += [CALL, *encode(f"{call['function']['name']} {call['function']['arguments']}")]
            ids += [END] if message["role"] == "assistant" else []
        return ids + ([ASSISTANT] if add_generation_prompt else [])

    def parse(
        self, output_ids: Sequence[int], *, prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> ParsedAnswer:
        text, *calls = decode(output_ids).split(chr(CALL))
        parts = [call.partition(" ") for call in calls]
        if not all(parts) or any(not name for name, _, _ in parts):
            return ParsedAnswer(content=text, error="a call must have a name")
        found = tuple(ToolCall(name=name, arguments=arguments) for name, _, arguments in parts)
        return ParsedAnswer(content=text, tool_calls=found)

    def bridge(
        self, previous_ids: Sequence[int], new_messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()
    ) -> list[int] | None:
        end = [] if previous_ids[-1] == END else [END]
        return [*previous_ids, *end, *self.render(new_messages)]


def encode(text: str) -> list[int]:
    """A token for each character."""
    return [ord(character) + 10 for character in text]


def decode(ids: Sequence[int]) -> str:
    """The text of an answer, with the marks of calls."""
    return "".join(chr(each - 10) if each >= 10 else chr(each) for each in ids if each != END)


class ScriptedPool:
    """Answers requests by a function of the text after the last mark of the assistant's role and all before it."""

    def __init__(self, answer: Callable[[list[int]], str]) -> None:
        self._answer, self.requests, self.params = answer, list[list[int]](), list[SamplingParams]()

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, n: int, **options: Any
    ) -> list[Generation]:
        self.requests.append(list(token_ids))
        self.params.append(params)
        answer = self._answer(list(token_ids))
        parts = answer.split("\x06")
        ids = encode(parts[0])
        for part in parts[1:]:
            ids += [CALL, *encode(part)]
        cut = [*ids, END][: params.max_new_tokens]
        return [
            Generation(
                output_ids=cut,
                logprobs=[-1.0] * len(cut),
                weight_versions=[1] * len(cut),
                finish_reason="stop" if cut[-1] == END else "length",
                text=answer,
                engine="scripted",
            )
        ] * n


def open_session(pool: ScriptedPool, *, max_new_tokens: int = 1000) -> GenerateSession:
    """A session of one trajectory."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return GenerateSession(params=params, rid="train-0", pool=cast(EnginePool, pool), versions=(1, 1))


def new_trajectory(text: str = "question", *, number: int = 0) -> Trajectory:
    """A trajectory without turns."""
    renderer = CharacterRenderer()
    messages = ({"role": "user", "content": text},)
    prompt = Prompt(index=number, text=text, token_ids=tuple(renderer.render(messages)), messages=messages)
    return Trajectory(id=number, group_index=number, prompt=prompt, seed=number)
