"""All uses of what Hydra and OmegaConf do not document, and may change in any release.

`hydra.compose` needs global state, and neither names the files of a value nor plans a sweep. Tests check that no other
module imports such names, and that `HYDRA` and `OMEGACONF` are the installed versions: read this file before you
change them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.default_element import ConfigDefault, GroupDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper, get_yaml_loader

from rlscale.config.hydra.config_folders import PRIMARY, ConfigFolders
from rlscale.config.yaml_aliases import check_aliases

HYDRA, OMEGACONF = "1.3.8", "2.3.1"
"""The versions that this module was written for."""

Loader = ConfigLoaderImpl

YamlLoader: Any = get_yaml_loader()
"""The class with which OmegaConf parses YAML: it reads `1e-5` as a number."""

YamlDumper: Any = get_omega_conf_dumper()
"""The class with which OmegaConf writes YAML: it quotes strings that `YamlLoader` would read as another type."""


@cache
def override_parser() -> OverridesParser:
    """The parser of overrides, created once: Hydra inspects the signatures of all its functions for each."""
    return OverridesParser.create()


def make_loader(folders: ConfigFolders) -> Loader:
    """Creates Hydra's loader. Unlike `hydra.compose` it needs no global state, so a job of a sweep can use it."""
    version.setbase("1.3")
    search_path = create_config_search_path(str(folders.main))
    if folders.extra is not None:
        # Hydra searches the folders in this order and uses the first match.
        search_path.append(
            "command-line", f"file://{folders.extra}", anchor=SearchPathQuery(provider="main", path=None)
        )
    loader = ConfigLoaderImpl(search_path)
    loader.repository = _LimitedRepository(search_path, folders)
    return loader


class _LimitedRepository(ConfigRepository):
    """The files of the config; one whose aliases repeat too many values raises AliasError before Hydra loads it."""

    def __init__(self, search_path: ConfigSearchPath, folders: ConfigFolders) -> None:
        super().__init__(search_path)
        self._folders = folders

    def load_config(self, config_path: str) -> ConfigResult | None:
        if file := self._folders.find_file(config_path.strip("/").removesuffix(".yaml")):
            check_aliases(file.read_text(encoding="utf-8"), YamlLoader)
        return super().load_config(config_path)


class _AppRepository(CachingConfigRepository):
    """The files of the config, without the settings of Hydra in `config.yaml`, which need Hydra's own configs."""

    def __init__(self, delegate: IConfigRepository) -> None:
        # The base class copies all sources, so that `hydra.searchpath` can replace them: a tenth of the time.
        self.delegate, self.cache = delegate, {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        is_first = not self.cache
        found = super().load_config(config_path)
        # Hydra loads the primary config first, and later reads this result again.
        if is_first and found is not None and found.defaults_list is not None and isinstance(found.config, DictConfig):
            found.config.pop("hydra", None)
            found.defaults_list = [
                each
                for each in found.defaults_list
                if not (isinstance(each, GroupDefault) and str(each.group).startswith("hydra/"))
            ]
        return found

    def sets_hydra(self) -> bool:
        """Whether a file that was read, other than `config.yaml`, sets or selects something of Hydra."""
        read = [each for each in self.cache.values() if each is not None]
        names = [str(name) for each in read if isinstance(each.config, DictConfig) for name in each.config]
        names += [str(each.header["package"]) for each in read]
        for default in (default for each in read for default in each.defaults_list or ()):
            if isinstance(default, GroupDefault | ConfigDefault):
                name = default.group if isinstance(default, GroupDefault) else default.path
                names += [str(default.package), str(name)]
        return any(re.match(r"/?hydra\b", name) for name in names)


def compose_app(loader: Loader, options: Sequence[str]) -> tuple[DictConfig, list[ResultDefault]] | None:
    """The config of `options` without the key `hydra`, and its files in the order of merging.

    Otherwise Hydra adds its 30 configs, which take half the time and are not part of the result.

    Returns: None if an option sets something of Hydra, which needs those configs.
    Raises: the errors of Hydra.
    """
    if any(option.lstrip("+~").startswith("hydra") for option in options):
        return None
    repository = _AppRepository(loader.repository)
    try:
        found = create_defaults_list(
            repo=repository,
            config_name=PRIMARY,
            overrides_list=override_parser().parse_overrides(list(options)),
            prepend_hydra=False,
            skip_missing=False,
        )
        config = loader._compose_config_from_defaults_list(defaults=found.defaults, repo=repository)
    except Exception:
        # A file may override an option of Hydra, which is then missing.
        if repository.sets_hydra():
            return None
        raise
    return None if repository.sets_hydra() or found.config_overrides else (config, found.defaults)


def apply_overrides(values: dict[str, Any], overrides: Sequence[Override]) -> DictConfig:
    """The config with `values` in which Hydra sets the keys of `overrides`. Raises its errors."""
    config = OmegaConf.create(values)
    OmegaConf.set_struct(config, True)
    ConfigLoaderImpl._apply_overrides_to_config(list(overrides), config)
    return config


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
