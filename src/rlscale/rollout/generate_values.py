"""Values that a run and the processes of a generate function exchange.

    run ── GenerateCall, answers (pickled) ──> process
        <── requests, the trajectory (JSON) ──

JSON, so that user code cannot make the run execute anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from rlscale.config import RunConfig
from rlscale.expert_routes import RouteShape
from rlscale.images import build_images
from rlscale.plugins.args_view import Args
from rlscale.plugins.user_hook import shown
from rlscale.rollout.record_json import images_to_json, turn_from_json, turn_to_json
from rlscale.trajectory import Trajectory, Turn
from rlscale.types import Failure, FailureCause, Prompt, SampleStatus, SamplingParams, WeightVersion

ISOLATION = "sampling.generate_isolation"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateSpec:
    """The generate function of a process."""

    path: str  # as `sampling.custom_generate_function_path`
    args: Args | None = None  # of a function in slime's form
    custom: dict[str, Any] = field(default_factory=dict)  # the config's node of that name
    config: RunConfig | None = None
    tokenizer: bytes | None = None  # pickled: its import takes seconds, and many functions need none


@dataclass(kw_only=True, slots=True)
class GenerateCall:
    """One call of a generate function, as its process gets it."""

    key: int  # names the call in messages
    trajectory: Trajectory
    params: SamplingParams
    is_evaluation: bool
    oldest_version: WeightVersion
    address: tuple[str, int] | None  # of an engine; None: not known
    gateway: bytes | None = None  # the pickled client
    is_stopped: bool = False


def params_changes(params: SamplingParams, base: SamplingParams) -> dict[str, Any]:
    """JSON values of the parameters that differ from those of the session."""
    changes = {each.name: getattr(params, each.name) for each in fields(SamplingParams)}
    changes = {name: value for name, value in changes.items() if value != getattr(base, name)}
    if "images" in changes:
        changes["images"] = images_to_json(params.images)
    if params.routes is not None and "routes" in changes:
        changes["routes"] = asdict(params.routes)
    if "others" in changes:
        changes["others"] = dict(params.others)
    return changes


def changed_params(changes: Mapping[str, Any], base: SamplingParams) -> SamplingParams:
    """The inverse of `params_changes`."""
    values = dict(changes)
    for name in ("stop", "stop_token_ids"):
        if name in values:
            values[name] = tuple(values[name])
    if "images" in values:
        values["images"] = build_images(values["images"])
    if values.get("routes") is not None:
        values["routes"] = RouteShape(**values["routes"])
    return replace(base, **values)


def outcome_to_json(trajectory: Trajectory, failure: Failure | None) -> dict[str, Any]:
    """The trajectory after a call, and the failure.

    Raises:
        ValueError: its metadata are no values of JSON.
    """
    return {
        "turns": [turn_to_json(turn) for turn in trajectory.turns],
        "status": str(SampleStatus(trajectory.status)),
        "reward": None if trajectory.reward is None or failure is not None else float(trajectory.reward),
        "metadata": {str(name): _json_value(name, value) for name, value in trajectory.metadata.items()},
        "failure": None if failure is None else failure_to_json(failure),
    }


def read_outcome(values: Mapping[str, Any], trajectory: Trajectory) -> Failure | None:
    """Writes the result of a call into its trajectory, and returns the failure."""
    if "turns" in values:
        turns = [_turn_from_json(each, trajectory.prompt) for each in values["turns"]]
        status, metadata = SampleStatus(values["status"]), dict(values["metadata"])
        trajectory.turns, trajectory.status, trajectory.metadata = turns, status, metadata
        trajectory.reward = values["reward"]
    failure = values["failure"]
    return None if failure is None else Failure(cause=FailureCause(failure["cause"]), message=failure["message"])


def failure_to_json(failure: Failure) -> dict[str, str]:
    """JSON values of a failure."""
    return {"cause": str(failure.cause), "message": failure.message}


def _turn_from_json(values: Mapping[str, Any], prompt: Prompt) -> Turn:
    turn = turn_from_json(values)
    if turn.prompt is not None:
        turn.prompt = replace(turn.prompt, turns=prompt.turns)
    return turn


def _json_value(name: object, value: Any) -> Any:
    """A value of the metadata as JSON has it: numbers of numpy become those of Python."""
    try:
        return json.loads(json.dumps(value, default=_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"trajectory.metadata[{shown(name)}] must be a value of JSON, got {shown(value)} ({error}); convert it, or "
            f"set {ISOLATION}=thread"
        ) from error


def _plain(value: Any) -> Any:
    """A number or an array of another library as values of Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it has the type {type(value).__name__}")
