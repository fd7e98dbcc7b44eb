"""Tools: typed functions that the policy may call, with the JSON schema of their parameters.

@tool
def add(a: int, b: int) -> int:
    \"\"\"Adds two numbers.

    Args:
        a: the first one.
        b: the second one.
    \"\"\"
    return a + b
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, update_wrapper
from typing import Any, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticUndefined, to_json

from rlscale.agents.image_parameters import ImageCount, bind_images, find_image_parameters
from rlscale.plugins.user_hook import is_coroutine_function
from rlscale.renderers.renderer import ToolSpec

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Example|Examples|Note|Notes):\s*$")
_ENTRY = re.compile(r"^(?P<indent>\s+)\*{0,2}(?P<name>\w+)\s*(?:\([^)]*\))?:\s*(?P<text>.*)$")
_NAME = re.compile(r"^[A-Za-z0-9_-]{1,64}$")
MAX_ERRORS = 4
"""Wrong arguments that a message lists."""


class ToolError(Exception):
    """Raised by a tool: its text is the result of the call, e.g. `raise ToolError("division by zero")`."""


class ToolDefinitionError(TypeError):
    """A function that cannot be a tool: `rule` completes "must ..."."""

    def __init__(self, rule: str, found: str) -> None:
        super().__init__(f"must {rule}, got {found}")
        self.rule, self.found = rule, found


class Tool:
    """A function that the policy may call. Calling it calls the function.

    Example:
        add.spec["function"]["parameters"]  # {"properties": {"a": {"type": "integer", ...}}, "required": ["a", "b"]}
        add.run('{"a": 1, "b": 2}')  # "3"
    """

    def __init__(
        self, function: Callable[..., Any], *, name: str | None = None, description: str | None = None
    ) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        text, self._parameter_docs = split_docstring(inspect.getdoc(function) or "")
        self.description = description or text
        update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        return is_coroutine_function(self.function)

    @cached_property
    def image_parameters(self) -> Mapping[str, ImageCount]:
        """The parameters that take images of the row, which are no arguments. Raises as `arguments`."""
        return find_image_parameters(self._hints())

    @cached_property
    def arguments(self) -> type[BaseModel]:
        """Model of the arguments.

        Raises:
            ToolDefinitionError: the function has a parameter that JSON cannot give.
        """
        if not _NAME.match(self.name):
            raise ToolDefinitionError("have a name of letters, digits, _ and -", repr(self.name))
        fields = {}
        hints = self._hints()
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ToolDefinitionError("take each argument by name", f"the parameter {parameter}")
            if name in self.image_parameters:
                continue
            if name not in hints:
                raise ToolDefinitionError("have a type for every parameter", f"{name} without one")
            # Not None, which is a default like any other.
            default = PydanticUndefined if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints[name], Field(default, description=self._parameter_docs.get(name)))
        # Names of parameters that begin with an underscore, or are those of pydantic, are refused by it.
        config = ConfigDict(extra="forbid", protected_namespaces=())
        try:
            model = create_model(self.name, __config__=config, **fields)  # type: ignore[call-overload]
            model.model_json_schema()
        except (PydanticUserError, NameError) as error:
            found = str(error).splitlines()[0]
            raise ToolDefinitionError(
                "have parameters with types of JSON, such as int, str or list[str]", found
            ) from error
        return model  # type: ignore[no-any-return]

    @cached_property
    def spec(self) -> ToolSpec:
        """The tool in the form of Chat Completions. Raises as `arguments`."""
        schema = _without_titles(self.arguments.model_json_schema())
        # The model has no docstring but that of pydantic.
        schema.pop("description", None)
        schema.setdefault("properties", {})
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }

    def parse(self, arguments: str) -> dict[str, Any]:
        """The checked arguments by name.

        Raises:
            ToolError: they are no JSON object, or do not fit the parameters. The text is for the policy.
        """
        try:
            model = self.arguments.model_validate_json(arguments or "{}")
        except ValidationError as error:
            raise ToolError(_describe(self.name, error)) from None
        return {name: getattr(model, name) for name in type(model).model_fields}

    def run(self, arguments: str, pictures: Sequence[Any] = ()) -> Any:
        """Calls the function with arguments as JSON. Returns its value, or a coroutine.

        Args:
            pictures: PIL images of the row.

        Raises:
            ToolError: as `parse`.
            ValueError: the function takes another number of images.
        """
        return self.function(**self.parse(arguments), **bind_images(self.image_parameters, pictures))

    def _hints(self) -> dict[str, Any]:
        # Hints of an object are those of its class.
        function = self.function if inspect.isroutine(self.function) else type(self.function).__call__
        try:
            return get_type_hints(function, include_extras=True)
        except (NameError, TypeError) as error:
            raise ToolDefinitionError("have types that can be found", str(error)) from error


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(*, name: str | None = None, description: str | None = None) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None, description: str | None = None
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Makes a typed function a tool. Its docstring describes it and, under `Args:`, its parameters.

    Args:
        name: of the tool; None: that of the function.
        description: None: the docstring up to its first section.
    """
    if function is not None:
        return Tool(function)
    return lambda given: Tool(given, name=name, description=description)


def result_text(value: Any) -> str:
    """The result of a tool as text: a string as it is, None as an empty one, anything else as JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return to_json(value, fallback=str, inf_nan_mode="constants").decode()


def cut_text(text: str, max_chars: int) -> str:
    """The beginning of a long text, with a note. Lone surrogates, which have no tokens, become question marks."""
    text = text.encode(errors="replace").decode()
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[{len(text) - max_chars} more characters are cut off]"


def split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and the text of each entry of the section `Args`."""
    description: list[str] = []
    entries: dict[str, str] = {}
    section = entry = ""
    for line in text.splitlines():
        # Sections in the style of Google; inspect.getdoc has removed the indent of the whole.
        found = _SECTION.match(line)
        if found is not None:
            section, entry = found[1], ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            match = _ENTRY.match(line)
            # Deeper lines continue the text of an entry, with a colon or not.
            if match is not None and len(match["indent"]) <= 4:
                entry = match["name"]
                entries[entry] = match["text"].strip()
            elif entry and line.strip():
                entries[entry] = f"{entries[entry]} {line.strip()}".strip()
    return " ".join(" ".join(description).split()), entries


def _describe(name: str, error: ValidationError) -> str:
    """Wrong arguments in one line, for the policy."""
    # Without URLs and contexts: they are for people, and long.
    problems = error.errors(include_url=False, include_context=False)
    if problems[0]["type"] == "json_invalid":
        return f"the arguments of {name} must be a JSON object; {problems[0]['msg']}"
    texts = [f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in problems[:MAX_ERRORS]]
    return f"wrong arguments of {name}: {'; '.join(texts)}"


def _without_titles(schema: Any) -> Any:
    """A JSON schema without the titles that pydantic makes of names."""
    if isinstance(schema, list):
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if not (name == "title" and isinstance(value, str))}
    # The names under `properties` are those of parameters.
    return {
        name: {key: _without_titles(each) for key, each in value.items()}
        if name in ("properties", "$defs") and isinstance(value, dict)
        else _without_titles(value)
        for name, value in kept.items()
    }
