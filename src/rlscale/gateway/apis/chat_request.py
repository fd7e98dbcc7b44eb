"""A request of any chat API in one form, and the error of one that cannot be answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlscale.renderers.renderer import Message, ToolSpec

MAX_CHOICES = 128
MAX_STOP_STRINGS = 32
MAX_SHOWN = 80


class InvalidRequest(ValueError):
    """A request that is refused. The message names the parameter.

    Attributes:
        param: path of the parameter; None: the request as a whole.
        status: of the HTTP response.
        code: for programs, e.g. `context_length_exceeded`; None: there is none.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        self.param, self.status, self.code = param, status, code
        super().__init__(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A request in the form of Chat Completions, checked.

    Attributes:
        sampling: parameters that the client gave: temperature, top_p, top_k, seed, and penalties.
        ignored: further parameters that the client gave and that have no effect.
        previous_id: response whose conversation the messages continue; None: they are the whole conversation.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    previous_id: str | None = None
    has_instructions: bool = False  # the first message is no part of the conversation that later responses continue
    echo: Mapping[str, Any] = field(default_factory=dict)  # parameters that the response repeats


class Fields:
    """The parameters of a request's JSON object: each is read once, and `finish` refuses the others.

    Example:
        fields = Fields(body)
        n = fields.integer("n", low=1, high=128) or 1
        fields.refuse("logit_bias", (None, {}), "the recorded logprobs would not be those of the policy")
        fields.finish()
    """

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise InvalidRequest(f"the body must be a JSON object, got {shown(body)}")
        self._body, self._read = body, set[str]()
        self.ignored: list[str] = []

    def get(self, name: str) -> Any:
        self._read.add(name)
        return self._body.get(name)

    def require(self, name: str) -> Any:
        if self._body.get(name) is None:
            raise InvalidRequest(f"{name} must be given", param=name)
        return self.get(name)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise wrong(name, "be a string", value)
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(name, "be true or false", value)
        return bool(value)

    def integer(self, name: str, *, low: int, high: int = 2**31) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        # A bool is an int in Python.
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(name, f"be a whole number from {low} to {high}", value)
        return value

    def number(self, name: str, *, low: float, high: float) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        # `not low <= value`: NaN fails, too.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise wrong(name, f"be a number from {low:g} to {high:g}", value)
        return float(value)

    def strings(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings, none of them empty."""
        value = self.get(name)
        given = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(given, list) or not all(isinstance(each, str) and each for each in given):
            raise wrong(name, "be a string or a list of strings, none of them empty", value)
        if len(given) > MAX_STOP_STRINGS:
            raise wrong(name, f"have at most {MAX_STOP_STRINGS} entries", len(given))
        return tuple(given)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise wrong(name, "be a JSON object", value)
        return value or {}

    def refuse(self, name: str, neutral: Sequence[Any], why: str) -> None:
        """Refuses a parameter unless it has one of the values that change nothing."""
        value = self.get(name)
        # By type, too: 0 == False, and True == 1.
        if not any(value == each and type(value) is type(each) for each in neutral):
            raise InvalidRequest(f"{name} cannot be used here, got {shown(value)}; {why}", param=name)

    def ignore(self, *names: str) -> None:
        """Accepts parameters that this server does not obey; they are reported if they are given."""
        self.ignored += [name for name in names if self.get(name) is not None]

    def accept(self, *names: str) -> None:
        """Accepts parameters that do not change an answer, e.g. the name of a user."""
        self._read.update(names)

    def finish(self) -> None:
        """Refuses parameters that were not read: they might change an answer."""
        for name in self._body.keys() - self._read:
            raise InvalidRequest(f"{name} is no parameter of this endpoint; remove it", param=name)


def wrong(name: str, rule: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"{name} must {rule}, got {shown(value)}", param=name)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def function_spec(name: Any, description: Any, parameters: Any, place: str) -> ToolSpec:
    """A tool in the form of Chat Completions."""
    if not isinstance(name, str) or not name:
        raise wrong(f"{place}.name", "be a string", name)
    if description is not None and not isinstance(description, str):
        raise wrong(f"{place}.description", "be a string", description)
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(f"{place}.parameters", "be a JSON schema", parameters)
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    # Templates read the parameters without asking whether there are some.
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
