"""A session without an engine, with which generate functions are tried before a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlscale.types import Generation, Group, SamplingParams

ANSWER = "2"


class ExampleTokenizer:
    """Tokens are the codes of characters."""

    eos_token_id = 0
    eos_token = "\0"

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text), "attention_mask": [1] * len(text)}

    def encode(self, text: str, **options: Any) -> list[int]:
        """The codes of the characters."""
        return list(map(ord, text))

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """The inverse of `encode`."""
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, messages: Sequence[Any], *, tokenize: bool = True, **options: Any) -> Any:
        """The contents of the messages, one after the other."""
        text = "".join(str(message["content"]) for message in messages)
        return self.encode(text) if tokenize else text


@dataclass
class ExampleSession:
    """Answers every request with the token of `ANSWER`, as made by weight version 1."""

    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=16, sampling_seed=0))
    config: Any = None
    tokenizer: Any = field(default_factory=ExampleTokenizer)
    address: tuple[str, int] = ("127.0.0.1", 30000)
    oldest_version: int = 1
    is_stopped: bool = False
    is_evaluation: bool = False
    num_requests: int = 0

    async def generate(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> Generation:
        """One answer."""
        self.num_requests += 1
        ids = self.tokenizer.encode(ANSWER)
        return Generation(
            output_ids=ids,
            logprobs=[-0.5] * len(ids),
            weight_versions=[1] * len(ids),
            finish_reason="stop",
            text=ANSWER,
            engine="example",
        )


@dataclass
class ExampleRollout:
    """Context of a rollout or eval function: prompts and groups of an example."""

    groups: list[Group]
    num_groups: int
    session: ExampleSession = field(default_factory=ExampleSession)
    metrics: dict[str, float] = field(default_factory=dict)
    drawn: list[int] = field(default_factory=list)

    def draw(self, number: int) -> list[Group]:
        """The next prompts."""
        first = len(self.drawn)
        drawn = self.groups[first : first + number]
        self.drawn += [group.index for group in drawn]
        return [Group(index=group.index, prompt=group.prompt, samples=[]) for group in drawn]

    def requeue(self, groups: Sequence[Group]) -> None:
        """Does nothing."""

    async def generate(self, group: Group) -> Group:
        """The graded group of the example."""
        return next(each for each in self.groups if each.index == group.index)
