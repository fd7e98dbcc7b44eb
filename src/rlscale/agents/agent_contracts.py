"""Contracts of tools and environments: calls them with a small made example and checks what they return."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping, Sequence
from inspect import isawaitable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlscale.agents.content_parts import image_contents
from rlscale.agents.environment import Action, Observation, StepResult, Task, as_messages
from rlscale.agents.environment_child import step_values
from rlscale.agents.tool import Tool, ToolDefinitionError, ToolError, result_text
from rlscale.images import IMAGE_TYPE, is_image_part, read_uri
from rlscale.plugins.contracts import Contract, ContractError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

EXAMPLE_TASK = Task(index=0, messages=({"role": "user", "content": "1+1="},), label="2", seed=7)
MAX_STEPS = 4
"""Steps of an environment in a check; it need not be done by then."""

_EXAMPLES: Mapping[str, Any] = {
    "integer": 1,
    "number": 1.5,
    "string": "text",
    "boolean": True,
    "array": [],
    "object": {},
}


def check_tool(
    tool: Tool, arguments: Mapping[str, Any] | None = None, *, images: Sequence[Picture] | None = None
) -> str:
    """Calls a tool and returns the text that the policy gets, with the size of each image in its place.

    Args:
        arguments: None: made from the schema.
        images: PIL images of the row. None: one of 64 x 48 pixels, if the tool takes images.

    Raises:
        ContractError: the function cannot be a tool, or its result is no text, image or JSON value.
    """
    try:
        schema = tool.spec["function"]["parameters"]
    except ToolDefinitionError as error:
        raise ContractError(error.rule, error.found) from error
    given = example_arguments(schema) if arguments is None else arguments
    if images is None:
        images = (example_picture(),) if tool.image_parameters else ()
    try:
        found = tool.run(result_text(given), images)
        found = asyncio.run(_wait_for(found)) if isawaitable(found) else found
    except ToolError as error:
        return f"Error: {error}"
    try:
        parts = image_contents(found, cut=str)
    except (OSError, ValueError) as error:
        raise ContractError("return texts, images or JSON values", str(error), says_why=True) from error
    return result_text(found) if parts is None else " ".join(map(_describe_part, parts))


def example_picture() -> Picture:
    """A picture whose pixels all differ, as a row would have it."""
    # Imported here: an extra, which tools without images do not need.
    from PIL import Image as PillowImage

    width, height = 64, 48
    picture = PillowImage.new("RGB", (width, height))
    picture.putdata([(4 * x, 5 * y, 128) for y in range(height) for x in range(width)])
    return picture


def _describe_part(part: Mapping[str, str]) -> str:
    if not is_image_part(part):
        return part["text"]
    # Imported here: as above.
    from PIL import Image as PillowImage

    try:
        with PillowImage.open(io.BytesIO(read_uri(part[IMAGE_TYPE]))) as picture:
            return f"[image {picture.width}x{picture.height}]"
    except (OSError, ValueError) as error:
        raise ContractError("return images that Pillow reads", str(error), says_why=True) from error


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the required parameters of a JSON schema."""
    definitions = schema.get("$defs", {})
    properties = schema.get("properties", {})
    return {name: _example(properties[name], definitions) for name in schema.get("required", ())}


def check_environment(create: Callable[[], Any], *, task: Task = EXAMPLE_TASK, action: str = "2") -> list[StepResult]:
    """Plays some steps in an environment and returns their results.

    Args:
        create: the class, or a function that returns an environment.
        action: the text of each answer of the policy.

    Raises:
        ContractError: a method is missing, or returns something else than it must.
    """
    return asyncio.run(_play(create, task, Action(text=action)))


async def _play(create: Callable[[], Any], task: Task, action: Action) -> list[StepResult]:
    environment = await _called(create)
    for name in ("reset", "step"):
        if not callable(getattr(environment, name, None)):
            raise ContractError(f"have a method {name}", f"an object of type {type(environment).__name__} without it")
    # Closed also if a method is wrong, as in a run.
    results: list[StepResult] = []
    try:
        found = await _called(environment.reset, task)
        try:
            start = as_messages(found.messages if isinstance(found, Observation) else found)
        except (TypeError, ValueError) as error:
            raise ContractError("have a method reset that returns messages", str(error), says_why=True) from error
        if not start:
            raise ContractError("have a method reset that returns messages", "no message")
        while len(results) < MAX_STEPS and not (results and results[-1].done):
            found = await _called(environment.step, action)
            try:
                step_values(found, max_chars=1000)
            except (TypeError, ValueError) as error:
                raise ContractError(
                    "have a method step that returns a StepResult", str(error), says_why=True
                ) from error
            results.append(found)
    finally:
        if callable(close := getattr(environment, "close", None)):
            await _called(close)
    return results


async def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    found = function(*arguments)
    return await found if isawaitable(found) else found


async def _wait_for(found: Any) -> Any:
    return await found


def _example(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "default" in schema:
        return schema["default"]
    if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return choices[0]
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return _example(schema[several][0], definitions)
    if schema.get("type") == "object" and "properties" in schema:
        return example_arguments({**schema, "$defs": definitions})
    # A lower limit is the simplest number that fits.
    return schema.get("minimum", _EXAMPLES.get(str(schema.get("type"))))


def _describe_tools(tools: Sequence[Tool]) -> str:
    return "; ".join(f"{each.name}: {check_tool(each)!r:.200}" for each in tools)


def _describe_steps(create: Callable[[], Any]) -> str:
    results = check_environment(create)
    return f"{len(results)} steps with rewards {[each.reward for each in results]}, done {results[-1].done}"


AGENT_CONTRACTS: Mapping[str, Contract] = MappingProxyType(
    {
        contract.kind: contract
        for contract in (
            Contract(
                kind="tool",
                key="agent.tools",
                call="@rlscale.agents.tool on a typed function, plain or async, or a list -> text, images or JSON",
                check=_describe_tools,
            ),
            Contract(
                kind="environment",
                key="agent.environment_path",
                call="() -> an object with reset(task) -> messages, step(action) -> StepResult, and maybe close()",
                check=_describe_steps,
            ),
        )
    }
)
"""The contracts by `--kind` of `rlscale-check-plugin`."""
