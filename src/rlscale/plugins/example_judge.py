"""A judge without a model, for checks and tests of rewards that ask one."""

from collections.abc import Mapping, Sequence
from typing import Any


class ExampleJudge:
    """Answers each request with the same text or number, and keeps the requests. Has the protocol `Judge`.

    Example:
        judge = ExampleJudge(text="Score: 7")
        values = check_reward(adapt("reward", score, judge=judge))
        assert "Is this correct?" in judge.prompts[0]
    """

    def __init__(self, *, text: str = "Score: 5", number: float = 0.5) -> None:
        self._text, self._number = text, number
        self.prompts: list[str | Sequence[Mapping[str, str]]] = []
        self.texts: list[str] = []

    async def generate(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        **sampling_params: Any,
    ) -> str:
        """Returns the text of the constructor."""
        self.prompts.append(prompt)
        return self._text

    async def score(self, texts: Sequence[str]) -> list[float]:
        """Returns the number of the constructor for each text."""
        self.texts += texts
        return [self._number] * len(texts)

    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        """Returns the text as `/generate` does, without any other field."""
        return {"text": self._text}

    def model(self, name: str) -> "ExampleJudge":
        """Returns this judge for every name."""
        return self
