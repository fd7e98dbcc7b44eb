"""Geometry with figures: before it answers, the policy may check an answer or enlarge a part of the figure.

row: figure, problem ──> policy ──> check(answer) ──> "wrong" ──> policy ──> zoom(...) ──> a larger picture ──> ...
"""

from __future__ import annotations

import io
import json
from typing import Any

from rlscale.agents import Action, Observation, StepResult, Task
from rlscale.images import IMAGE_TYPE, is_image_part, read_uri
from rlscale.renderers.renderer import ToolSpec
from rlscale.rewards.boxed_math import math_reward
from rlscale.types import Prompt, Sample

MIN_SIDE = 448
"""Pixels of the shorter side of an enlarged part."""


def _spec(name: str, description: str, **parameters: dict[str, Any]) -> ToolSpec:
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_SIDE = {"type": "number", "minimum": 0, "maximum": 1}
TOOLS = (
    _spec("check", "Says whether an answer is right.", answer={"type": "string"}),
    _spec("zoom", "Shows a part of the figure, enlarged.", left=_SIDE, top=_SIDE, right=_SIDE, bottom=_SIDE),
)


class Geometry:
    r"""One problem. An answer without a call ends it; the reward of the run grades its \boxed{...}."""

    def __init__(self) -> None:
        self._task = Task(index=0, messages=())

    def reset(self, task: Task) -> Observation:
        """Shows the row: its figure and its problem."""
        self._task = task
        return Observation(messages=task.messages, tools=TOOLS)

    def step(self, action: Action) -> StepResult:
        """Answers the calls of an answer."""
        if action.error is not None:
            return StepResult(messages=f"Error: the tool call cannot be read: {action.error}")
        if not action.tool_calls:
            return StepResult(done=True)
        return StepResult(
            messages=[
                {
                    "role": "tool",
                    "name": call.name,
                    "tool_call_id": call.id or f"call_{number}",
                    "content": self._result(call.name, call.arguments),
                }
                for number, call in enumerate(action.tool_calls)
            ]
        )

    def _result(self, name: str, arguments: str) -> Any:
        # Wrong calls are the policy's: it sees the error.
        try:
            given = json.loads(arguments)
            if name == "check":
                return "right" if self._is_right(str(given["answer"])) else "wrong"
            if name == "zoom":
                return self._part(*(float(given[side]) for side in ("left", "top", "right", "bottom")))
        except (ValueError, KeyError, TypeError) as error:
            return f"Error: {type(error).__name__}: {error}"
        return f"Error: there is no tool {name[:80]!r}; the tools are check and zoom"

    def _is_right(self, answer: str) -> bool:
        prompt = Prompt(index=self._task.index, text="", token_ids=(), label=self._task.label)
        response = rf"\boxed{{{answer}}}"
        return math_reward(Sample(index=0, group_index=0, prompt=prompt, seed=0, response=response)) == 1.0

    def _part(self, left: float, top: float, right: float, bottom: float) -> Any:
        from PIL import Image  # an extra, which runs without images do not need

        parts = [part for each in self._task.messages if isinstance(each["content"], list) for part in each["content"]]
        uri = next((part[IMAGE_TYPE] for part in parts if is_image_part(part)), None)
        if uri is None:
            raise ValueError("the problem has no figure")
        if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
            raise ValueError("sides must be from 0 to 1, left below right and top below bottom")
        with Image.open(io.BytesIO(read_uri(uri))) as figure:
            width, height = figure.size
            box = (int(left * width), int(top * height), int(right * width), int(bottom * height))
            part = figure.convert("RGB").crop((*box[:2], max(box[2], box[0] + 1), max(box[3], box[1] + 1)))
        # At most twice as wide as high, or the reverse: models refuse strips.
        scale = max(1.0, MIN_SIDE / min(part.size))
        sides = [min(round(side * scale), 2 * MIN_SIDE) for side in part.size]
        return [{"type": IMAGE_TYPE, IMAGE_TYPE: part.resize((sides[0], sides[1]))}]
