"""Shell completion by Hydra's plug-ins, extended from the keys in YAML files to all keys."""

from __future__ import annotations

from typing import Any

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf import DictConfig, OmegaConf

from rlscale.config.hydra.config_folders import PRIMARY, ConfigFolders
from rlscale.config.hydra.internals import Loader, make_loader
from rlscale.config.hydra.yaml_files import set_nested
from rlscale.config.keys import keys
from rlscale.errors import ConfigError, Problem

ACTIONS = ("install", "uninstall", "query")


def run_completion(request: str, folders: ConfigFolders) -> None:
    """Prints the script that installs completion or, for that script, the candidates to complete a line.

    Args:
        request: `install=bash`, `uninstall=bash` or `query=bash`; also of zsh and fish.
        folders: the folders of options.

    Raises: ConfigError for any other request.
    """
    action, _, shell = request.partition("=")
    found: list[Any] = Plugins.instance().discover(CompletionPlugin)
    plugins = {plugin.provides(): plugin for plugin in found}
    if action not in ACTIONS or shell not in plugins:
        shells = "|".join(sorted(plugins))
        rule = f"be {'|'.join(ACTIONS)}=<{shells}>"
        fix = 'write eval "$(rlscale-train -sc install=bash)"'
        raise ConfigError([Problem(path="-sc", rule=rule, value=request or "nothing", fix=fix)])
    plugin = plugins[shell](_AllKeysLoader(make_loader(folders)))
    if action == "query":
        plugin.query(PRIMARY)
    elif action == "install":
        plugin.install()
    else:
        plugin.uninstall()


class _AllKeysLoader:
    """A loader for completion: groups and options from Hydra, keys and their choices from the dataclasses."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def load_configuration(self, **_: Any) -> DictConfig:
        """Every key, nested; a number has its default as the value to complete."""
        nested: dict[str, Any] = {}
        for key in keys().values():
            # Hydra completes a leaf from its value; other types are completed by get_group_options.
            is_number = key.type in (int, float)
            set_nested(nested, key.path, {} if key.is_mapping else key.default if is_number else None)
        return OmegaConf.create(nested)

    def get_group_options(self, group_name: str, results_filter: ObjectType, **_: Any) -> list[str]:
        """Options of a group. Hydra also calls it for the values that may follow `<key>=`."""
        key = keys().get(group_name)
        if key is not None and results_filter == ObjectType.CONFIG:
            return ["true", "false"] if key.type is bool else list(key.choices)
        # Without the earlier overrides: they change no group, and an invalid one would stop completion.
        return list(self._loader.get_group_options(group_name, results_filter, PRIMARY, []))
