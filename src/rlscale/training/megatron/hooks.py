"""Calls to the user's functions in a Megatron-core trainer. A key that is not set has no effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rlscale.config import MegatronConfig
from rlscale.errors import ConfigError, Problem
from rlscale.hook_protocols import BeforeLogprobs, BeforeTrainStep, MegatronInit, ModelProvider
from rlscale.training.loss.user_hooks import load_user_function
from rlscale.training.spec import TrainerSpec

PROVIDER = "model.custom_model_provider_path"


def call_after_init(megatron: MegatronConfig, custom: Mapping[str, Any]) -> None:
    """Calls `megatron.init_hook_path`, after the process groups and before any model are created."""
    path = megatron.init_hook_path
    if path is not None:
        load_user_function("megatron.init_hook_path", path, MegatronInit, custom=custom)(megatron)


def call_before_logprobs(spec: TrainerSpec, chunks: Sequence[nn.Module], *, role: str) -> None:
    """Calls `megatron.before_log_prob_hook_path`, when the chunks hold the weights of `role`."""
    path = spec.megatron.before_log_prob_hook_path
    if path is not None:
        key = "megatron.before_log_prob_hook_path"
        load_user_function(key, path, BeforeLogprobs, custom=spec.custom)(chunks, role)


def call_before_step(
    spec: TrainerSpec, chunks: Sequence[nn.Module], optimizer: Any, *, rollout_id: int, step_id: int
) -> None:
    """Calls `megatron.before_train_step_hook_path`, before the gradients of a step are computed."""
    path = spec.megatron.before_train_step_hook_path
    if path is not None:
        key = "megatron.before_train_step_hook_path"
        hook = load_user_function(key, path, BeforeTrainStep, custom=spec.custom)
        hook(rollout_id, step_id, chunks, optimizer)


class ChunkBuilder:
    """Builds a pipeline chunk of class `kind` from `arguments`. A user's model provider receives it as `build`.

    Example:
        build()                                         # the default chunk
        build(transformer_layer_spec=my_layers(build.arguments["config"]))
    """

    def __init__(self, kind: type[Any], arguments: Mapping[str, Any]) -> None:
        self.kind, self.arguments = kind, dict(arguments)

    def __call__(self, **changes: Any) -> Any:
        return self.kind(**{**self.arguments, **changes})

    def build_with(self, path: str | None, custom: Mapping[str, Any]) -> Any:
        """Builds the chunk with the user's function at `path`; None: the default chunk.

        Raises:
            ConfigError: the function returned something else than a chunk.
        """
        if path is None:
            return self()
        provider = load_user_function(PROVIDER, path, ModelProvider, custom=custom)
        arguments = self.arguments
        chunk = provider(self, arguments["pre_process"], arguments["post_process"], arguments["vp_stage"])
        if isinstance(chunk, self.kind):
            return chunk
        rule = f"return a {self.kind.__name__}"
        fix = "return the result of build(...), or an instance of a subclass of build.kind"
        raise ConfigError([Problem(path=PROVIDER, rule=rule, value=f"{type(chunk).__name__} from {path}", fix=fix)])
