"""Generations, prompts and trajectories as JSON. Columns of tokens are base64 of little-endian arrays."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rlscale.expert_routes import RouteShape
from rlscale.images import Image, build_images
from rlscale.trajectory import Trajectory, Turn, WeightSpan
from rlscale.types import Failure, FailureCause, Generation, Prompt, SampleStatus, SamplingParams

_TUPLES = ("stop", "stop_token_ids")


def array_to_json(values: Any, dtype: str) -> dict[str, Any]:
    """An array with its type and shape.

    Args:
        dtype: of numpy, e.g. `<i4`.
    """
    array = np.ascontiguousarray(np.asarray(values, dtype))
    return {"dtype": dtype, "shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode()}


def array_from_json(value: Mapping[str, Any]) -> Any:
    dtype = np.dtype(value["dtype"])
    # Numbers only: an array of objects would be unpickled.
    assert dtype.kind in "iuf", f"an array must have numbers, got {dtype}"
    return np.frombuffer(base64.b64decode(value["data"]), dtype).reshape(value["shape"]).copy()


def generation_to_json(generation: Generation) -> dict[str, Any]:
    return {
        "output_ids": array_to_json(generation.output_ids, "<i4"),
        # As the engine sent them: a client that asks again gets the same number.
        "logprobs": array_to_json(generation.logprobs, "<f8"),
        "weight_versions": array_to_json(generation.weight_versions, "<i4"),
        "finish_reason": generation.finish_reason,
        "text": generation.text,
        "engine": generation.engine,
        "routes": _routes_to_json(generation.routes),
        "interval_s": generation.interval_s,
    }


def generation_from_json(value: Mapping[str, Any]) -> Generation:
    return Generation(
        output_ids=array_from_json(value["output_ids"]).tolist(),
        logprobs=array_from_json(value["logprobs"]).tolist(),
        weight_versions=array_from_json(value["weight_versions"]).tolist(),
        finish_reason=value["finish_reason"],
        text=value["text"],
        engine=value["engine"],
        routes=None if value["routes"] is None else array_from_json(value["routes"]),
        interval_s=None if value["interval_s"] is None else tuple(value["interval_s"]),
    )


def prompt_to_json(prompt: Prompt) -> dict[str, Any]:
    """A prompt without the conversation of supervised training."""
    return {
        "index": prompt.index,
        "text": prompt.text,
        "token_ids": array_to_json(prompt.token_ids, "<i4"),
        "label": prompt.label,
        "metadata": prompt.metadata,
        "messages": list(prompt.messages),
        "images": images_to_json(prompt.images),
    }


def prompt_from_json(value: Mapping[str, Any]) -> Prompt:
    return Prompt(
        index=value["index"],
        text=value["text"],
        token_ids=tuple(array_from_json(value["token_ids"]).tolist()),
        label=value["label"],
        metadata=dict(value["metadata"]),
        messages=tuple(value["messages"]),
        images=build_images(value["images"]),
    )


def images_to_json(images: Sequence[Image]) -> list[dict[str, Any]]:
    """Fields of images, which `build_images` reads: an image is the path of a file, or a data URL."""
    return [asdict(image) for image in images]


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    return asdict(params)


def params_from_json(value: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of a session.

    Raises:
        TypeError: a name is no parameter.
    """
    own = {**value, **{name: tuple(value[name]) for name in _TUPLES if name in value}}
    if "images" in own:
        own["images"] = build_images(own["images"])
    if own.get("routes") is not None:
        own["routes"] = RouteShape(**own["routes"])
    return SamplingParams(**own)


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    failure = trajectory.failure
    return {
        "id": trajectory.id,
        "group_index": trajectory.group_index,
        "prompt": prompt_to_json(trajectory.prompt),
        "seed": trajectory.seed,
        "turns": [turn_to_json(turn) for turn in trajectory.turns],
        "status": str(trajectory.status),
        "failure": None if failure is None else {"cause": str(failure.cause), "message": failure.message},
        "metadata": trajectory.metadata,
        "num_attempts": trajectory.num_attempts,
        "reward": trajectory.reward,
    }


def trajectory_from_json(value: Mapping[str, Any]) -> Trajectory:
    failure = value["failure"]
    return Trajectory(
        id=value["id"],
        group_index=value["group_index"],
        prompt=prompt_from_json(value["prompt"]),
        seed=value["seed"],
        turns=[turn_from_json(turn) for turn in value["turns"]],
        status=SampleStatus(value["status"]),
        failure=None if failure is None else Failure(cause=FailureCause(failure["cause"]), message=failure["message"]),
        metadata=dict(value["metadata"]),
        num_attempts=value["num_attempts"],
        reward=value["reward"],
    )


def turn_to_json(turn: Turn) -> dict[str, Any]:
    return {
        "parent": turn.parent,
        "sampled": turn.sampled,
        "text": turn.text,
        "token_ids": array_to_json(turn.token_ids, "<i4"),
        "logprobs": array_to_json(turn.logprobs, "<f4"),
        "spans": [list(span) for span in turn.spans],
        "routes": _routes_to_json(turn.routes),
        "prompt": None if turn.prompt is None else prompt_to_json(turn.prompt),
        "images": images_to_json(turn.images),
        "messages": [dict(message) for message in turn.messages],
        "interval_s": turn.interval_s,
    }


def turn_from_json(value: Mapping[str, Any]) -> Turn:
    return Turn(
        parent=value["parent"],
        sampled=value["sampled"],
        text=value["text"],
        token_ids=array_from_json(value["token_ids"]),
        logprobs=array_from_json(value["logprobs"]),
        spans=[WeightSpan(*span) for span in value["spans"]],
        routes=None if value["routes"] is None else array_from_json(value["routes"]),
        prompt=None if value["prompt"] is None else prompt_from_json(value["prompt"]),
        images=build_images(value["images"]),
        messages=tuple(value["messages"]),
        interval_s=None if value["interval_s"] is None else tuple(value["interval_s"]),
    )


def _routes_to_json(routes: Any) -> dict[str, Any] | None:
    return None if routes is None else array_to_json(routes, routes.dtype.str)
