"""Trajectories as JSON, and the checks that a submission must pass.

Whatever could not be trained on is refused here, so that its producer learns of it and not the run, hours later.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails

from rlscale.types import REWARD_WEIGHTS, REWARDS, FailureCause

MAX_NAME = 200
MAX_SHOWN = 60
MAX_GROUP_SIZE = 65_536
MAX_FLOAT = 1e30
"""Larger numbers would become infinite in the float32 columns of a batch."""

RESERVED = frozenset({REWARDS, REWARD_WEIGHTS, "buffer"})
"""Entries of a sample's metadata that the run itself sets."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Version = Annotated[int, Field(ge=0, lt=2**31)]
Logprob = Annotated[float, Field(ge=-MAX_FLOAT, le=0.001)]  # engines round a probability of 1 up
Finite = Annotated[float, Field(ge=-MAX_FLOAT, le=MAX_FLOAT)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class PromptRecord(_Record):
    """The prompt of a trajectory."""

    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    text: str = ""
    label: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class FailureRecord(_Record):
    """The reason why a trajectory has no result."""

    cause: FailureCause
    message: Annotated[str, Field(min_length=1)]


class TrajectoryRecord(_Record):
    """One finished trajectory.

    Example:
        {"id": "17-0", "group": "17", "group_size": 8, "prompt": {"token_ids": [4, 7]}, "response_ids": [5, 2],
         "logprobs": [-0.1, -0.7], "weight_versions": 3, "reward": 1.0}
    """

    id: Name  # a repeated submission with the same id is accepted once
    group: Name
    group_size: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)]
    task_type: Name = "math"
    prompt: PromptRecord
    response_ids: list[TokenId]  # [R]
    logprobs: list[Logprob]  # [R] under the temperature-scaled distribution, as engines report them
    loss_mask: list[Literal[0, 1]] | None = None  # [R] None: all tokens are trainable
    weight_versions: Version | list[Version]  # [R] or one for all tokens
    response: str = ""
    reward: Finite | None = None
    status: Literal["completed", "truncated", "failed"] = "completed"
    failure: FailureRecord | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_metadata(self) -> TrajectoryRecord:
        if taken := RESERVED.intersection(self.metadata):
            raise ValueError(f"metadata must not have the key {min(taken)}, which the run sets; rename it")
        return self

    @model_validator(mode="after")
    def _check_columns(self) -> TrajectoryRecord:
        number = len(self.response_ids)
        columns = {"logprobs": self.logprobs, "loss_mask": self.loss_mask, "weight_versions": self.weight_versions}
        for name, column in columns.items():
            if isinstance(column, list) and len(column) != number:
                raise ValueError(f"{name} must have {number} entries, as many as response_ids, got {len(column)}")
        return self

    @model_validator(mode="after")
    def _check_result(self) -> TrajectoryRecord:
        if self.status == "failed":
            return self._check_failure()
        if self.failure is not None:
            raise ValueError(f"failure must be null with status {self.status}, got one; send status failed instead")
        if self.reward is None:
            raise ValueError(f"reward must be a number with status {self.status}, got null; send status failed instead")
        if not self.response_ids or (self.loss_mask is not None and not any(self.loss_mask)):
            raise ValueError("response_ids must have a trainable token; send status failed instead")
        return self

    def _check_failure(self) -> TrajectoryRecord:
        """A failure is a value: it has a cause and no reward."""
        if self.failure is None:
            raise ValueError("failure must be an object with cause and message with status failed, got null")
        if self.failure.cause.is_graded:
            raise ValueError(
                f"failure.cause must be a cause without a reward, got {self.failure.cause}; send its reward with "
                "status completed or truncated"
            )
        if self.reward is not None:
            raise ValueError(f"reward must be null with status failed, got {self.reward:g}")
        return self

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + len(self.response_ids)

    @property
    def highest_token(self) -> int:
        return max(max(self.prompt.token_ids), max(self.response_ids, default=0))


class SubmissionError(ValueError):
    """A submission that is refused; the message names the trajectory and the field."""

    def __init__(self, message: str, *, status: int = 422) -> None:
        self.status = status
        super().__init__(message)


_ONE, _SEVERAL = TypeAdapter(TrajectoryRecord), TypeAdapter(list[TrajectoryRecord])


def parse_submission(body: bytes) -> list[TrajectoryRecord]:
    """The trajectories of a request: a JSON object, or a list of them.

    Raises:
        SubmissionError: one of them cannot be trained on.
    """
    is_list = body.lstrip()[:1] == b"["
    try:
        records = _SEVERAL.validate_json(body) if is_list else [_ONE.validate_json(body)]
    except ValidationError as error:
        raise SubmissionError(describe_error(error.errors(include_url=False)[0])) from None
    if not records:
        raise SubmissionError("the list must have at least one trajectory, got none")
    return records


def describe_error(error: ErrorDetails) -> str:
    """`<path> must <rule>, got <value>` for the first error of pydantic."""
    # Names of the alternatives of a union, such as `list[int]`, are no part of the path.
    loc = [each for each in error["loc"] if isinstance(each, int) or each.isidentifier()]
    path = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in loc).lstrip(".")
    kind, message = error["type"], error["msg"]
    if kind == "json_invalid":
        return f"the body must be JSON, got {message.removeprefix('Invalid JSON: ')}"
    if kind == "missing":
        return f"{path} must be given"
    if kind == "extra_forbidden":
        return f"{path} is no field of a trajectory; move it into metadata"
    if kind == "value_error":
        return f"{path}.{message.removeprefix('Value error, ')}".lstrip(".")
    rule = re.sub(r"^\w+ should", "must", message)  # pydantic names the type: "String should have ..."
    return f"{path or 'the body'} {rule}, got {_shorten(error['input'])}"


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
