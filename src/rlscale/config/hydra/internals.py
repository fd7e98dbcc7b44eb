"""All uses of what Hydra and OmegaConf do not document, and may change in any release.

`hydra.compose` needs global state, and neither names the files of a value nor plans a sweep. Tests check that no other
module imports such names, and that `HYDRA` and `OMEGACONF` are the installed versions: read this file before you
change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig
from omegaconf._utils import get_yaml_loader

from rlscale.config.hydra.config_folders import PRIMARY, ConfigFolders

HYDRA, OMEGACONF = "1.3.8", "2.3.1"
"""The versions that this module was written for."""

Loader = ConfigLoaderImpl

YamlLoader: Any = get_yaml_loader()
"""The class with which OmegaConf parses YAML: it reads `1e-5` as a number."""


def make_loader(folders: ConfigFolders) -> Loader:
    """Creates Hydra's loader. Unlike `hydra.compose` it needs no global state, so a job of a sweep can use it."""
    version.setbase("1.3")
    search_path = create_config_search_path(str(folders.main))
    if folders.extra is not None:
        # Hydra searches the folders in this order and uses the first match.
        search_path.append(
            "command-line", f"file://{folders.extra}", anchor=SearchPathQuery(provider="main", path=None)
        )
    return ConfigLoaderImpl(search_path)


def compose_sweep(loader: Loader, overrides: Sequence[str]) -> DictConfig:
    """The config of a sweep itself, with its launcher, sweeper and folder."""
    # Slow to import, and only sweeps need it.
    from hydra._internal.hydra import Hydra

    return Hydra(task_name="rlscale", config_loader=loader).compose_config(
        config_name=PRIMARY, overrides=list(overrides), run_mode=RunMode.MULTIRUN, with_log_configuration=False
    )


def sweep_context(loader: Loader) -> HydraContext:
    """The context of sweepers and launchers, without callbacks."""
    # Only sweeps need it.
    from hydra._internal.callbacks import Callbacks

    return HydraContext(config_loader=loader, callbacks=Callbacks())


def inner_node(config: DictConfig, name: str) -> DictConfig | None:
    """The mapping at a key without the checks of an access; None for a plain value or null."""
    child = config._get_node(name)
    return child if isinstance(child, DictConfig) and not child._is_none() else None
