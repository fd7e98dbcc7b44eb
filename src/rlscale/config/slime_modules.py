"""Import paths of slime for user functions, with `run.slime_modules`: each name is an object of rlscale.

    from slime.utils.types import Sample        # rlscale.plugins.sample_view.DocumentSample

A module of the table is created at its first import, and a name is resolved at its first use, so that nothing is
imported for functions that do not use it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

from rlscale.errors import ConfigError, Problem

KEY = "run.slime_modules"
VARIABLE = "RLSCALE_SLIME_MODULES"
"""Set in this process for its children, which import user functions too."""

_SAMPLES, _REQUESTS = "rlscale.plugins.sample_view", "rlscale.plugins.slime_requests"
_STATE, _OBJECTS = "rlscale.plugins.slime_generation", "rlscale.plugins.slime_objects"
_REWARDS = "rlscale.rewards.slime_rewards"

MODULES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "slime.utils.types": {"Sample": f"{_SAMPLES}:DocumentSample"},
        "slime.utils.http_utils": {"post": f"{_REQUESTS}:post", "get": f"{_REQUESTS}:get"},
        "slime.utils.misc": {
            "SingletonMeta": f"{_OBJECTS}:SingletonMeta",
            "load_function": f"{_OBJECTS}:load_function",
        },
        "slime.utils.async_utils": {"run": f"{_OBJECTS}:run_coroutine"},
        "slime.utils.processing_utils": {"load_tokenizer": f"{_STATE}:load_slime_tokenizer"},
        "slime.rollout.base_types": {
            "RolloutFnTrainOutput": f"{_OBJECTS}:RolloutFnTrainOutput",
            "RolloutFnEvalOutput": f"{_OBJECTS}:RolloutFnEvalOutput",
        },
        "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": f"{_OBJECTS}:DynamicFilterOutput"},
        "slime.rollout.filter_hub.dynamic_sampling_filters": {
            "check_reward_nonzero_std": f"{_OBJECTS}:check_reward_nonzero_std"
        },
        "slime.rollout.sglang_rollout": {
            "GenerateState": f"{_STATE}:GenerateState",
            "generate": f"{_STATE}:generate",
            "get_model_url": f"{_REQUESTS}:get_model_url",
        },
        "slime.rollout.rm_hub": {
            "async_rm": f"{_REWARDS}:async_rm",
            "batched_async_rm": f"{_REWARDS}:batched_async_rm",
        },
        "slime.rollout.rm_hub.math_dapo_utils": {"compute_score": f"{_REWARDS}:compute_score"},
        "slime.rollout.rm_hub.math_utils": {"extract_answer": "rlscale.rewards.last_box:last_boxed"},
    }
)
"""Module -> name -> `module:name` of the object."""


def install_slime_modules() -> None:
    """Lets this process and its children import the modules of the table. Does nothing the second time.

    Raises:
        ConfigError: slime is installed: its modules would be hidden.
    """
    os.environ[VARIABLE] = "1"
    if any(isinstance(finder, SlimeFinder) for finder in sys.meta_path):
        return
    found = importlib.util.find_spec("slime")
    if found is not None and found.origin is not None:
        fix = f"slime is installed ({found.origin}), and your functions import it"
        raise ConfigError([Problem(path=KEY, rule="be false where slime is installed", value="true", fix=fix)])
    # First: a folder named slime, such as a clone of its repository with the examples, is a package without modules.
    sys.modules.pop("slime", None)
    sys.meta_path.insert(0, SlimeFinder())


def remove_slime_modules() -> None:
    """Ends the effect of `install_slime_modules`; modules that were imported keep the objects that they have."""
    os.environ.pop(VARIABLE, None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, SlimeFinder)]
    for name in [name for name in sys.modules if name == "slime" or name.startswith("slime.")]:
        del sys.modules[name]


class SlimeFinder(MetaPathFinder, Loader):
    """Creates the modules of the table and their parents."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module, if rlscale provides it.

        Raises:
            ModuleNotFoundError: it is another module of slime.
        """
        if fullname.partition(".")[0] != "slime":
            return None
        if fullname not in MODULES and not any(name.startswith(f"{fullname}.") for name in MODULES):
            raise ModuleNotFoundError(
                f"{fullname} must be a module that rlscale provides, one of {', '.join(MODULES)}", name=fullname
            )
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        """None: Python creates an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module."""
        names = MODULES.get(module.__name__, {})

        def resolve(name: str) -> Any:
            if name not in names:
                known = f"one of {', '.join(names)}" if names else "nothing"
                raise AttributeError(f"{module.__name__}.{name} must be a name that rlscale provides, {known}")
            place, _, attribute = names[name].partition(":")
            value = getattr(importlib.import_module(place), attribute)
            setattr(module, name, value)
            return value

        module.__getattr__ = resolve  # type: ignore[method-assign]  # Python calls it for a name that is not set
        module.__all__ = list(names)  # type: ignore[attr-defined]
