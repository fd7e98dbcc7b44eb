"""Hooks in the routers of transformers for routing replay; see `rlscale.training.modules.expert_routing`.

    router.forward ─ scores of the experts ─ topk ──┬── choice of the router ──┐
                                                    └── replayed experts ──────┴─ scores at the experts ─ weights

Every router of transformers chooses by one `topk` over the scores of all experts, whatever it computes before and
after. Only the result of this call is replaced, so that each family keeps its own formula of the weights, and the
router its gradient.

Shape legend: T positions of this rank, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rlscale.config import AlgoConfig
from rlscale.errors import ConfigError, Problem
from rlscale.training.distributed import RankGrid
from rlscale.training.fsdp.model import decoder_layers
from rlscale.training.modules.expert_routing import RouterHook, RoutingReplay, make_routing_replay, replayed_key

_TOPK = (torch.topk, torch.Tensor.topk)


def hook_routers(
    model: PreTrainedModel, algo: AlgoConfig, *, grid: RankGrid, device: torch.device
) -> RoutingReplay | None:
    """Installs hooks in the routers of all layers; None: the config replays no routes.

    Raises ConfigError for a model without routers.
    """
    key = replayed_key(algo)
    if key is None:
        return None
    layers = decoder_layers(model)
    found = [(layer, router) for layer, module in enumerate(layers) for router in _routers(module)]
    if not found:
        raise _refusal(key, model.config.model_type, "remove it: none of its layers has a router of experts")
    hooks = [
        FsdpRouterHook(router, index=i, layer=layer, refusal=partial(_refusal, key, model.config.model_type))
        for i, (layer, router) in enumerate(found)
    ]
    groups = [] if grid.context is None else [grid.context.group]
    return make_routing_replay(algo, hooks, device=device, num_layers=len(layers), groups=groups)


class FsdpRouterHook(RouterHook):
    """Replaces the forward method of a router of transformers.

    Args:
        router: its `topk` over all experts chooses.
        index: as in `RouterHook`, like `layer`.
        refusal: makes the error of a router that chooses in another way.
    """

    def __init__(self, router: nn.Module, *, index: int, layer: int, refusal: Callable[[str], ConfigError]) -> None:
        num_chosen, num_experts = _size(router, "top_k"), _size(router, "num_experts")
        super().__init__(index=index, layer=layer, num_chosen=num_chosen, num_experts=num_experts)
        self._refusal = refusal
        # On the instance: it also runs when the layer is recomputed in the backward pass.
        router.forward = partial(self._forward, router)

    def _forward(self, router: nn.Module, *args: Any, **options: Any) -> Any:
        with _Choosing(self) as choosing:
            result = type(router).forward(router, *args, **options)
        if choosing.num_choices != 1:
            raise self._refusal(f"remove it: its {type(router).__name__} does not choose experts by one topk")
        return result


class _Choosing(TorchFunctionMode):
    """Context in which the choice of a router is replaced."""

    def __init__(self, hook: RouterHook) -> None:
        super().__init__()
        self._hook, self.num_choices = hook, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return result
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        hook, own = self._hook, result[1]
        # A choice among groups of experts has another shape.
        if (scores.dim(), scores.shape[-1], own.shape[-1]) != (2, hook.num_experts, hook.num_chosen):
            return result
        self.num_choices += 1
        chosen = hook.choose(own)
        return result if chosen is None else type(result)((scores.gather(1, chosen), chosen))


def _routers(layer: nn.Module) -> list[nn.Module]:
    return [module for module in layer.modules() if type(module).__name__.endswith("Router") and _has_sizes(module)]


def _has_sizes(module: nn.Module) -> bool:
    return isinstance(getattr(module, "top_k", None), int) and isinstance(getattr(module, "num_experts", None), int)


def _size(router: nn.Module, name: str) -> int:
    size = getattr(router, name)
    assert isinstance(size, int), f"{name} of a router is a number"
    return size


def _refusal(key: str, model_type: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=key, rule=f"be false with a {model_type} model", value="true", fix=fix)])
