"""Shell completion by Hydra's own plug-ins, which are given every key there is instead of those that YAML files set."""

from __future__ import annotations

from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf import DictConfig, OmegaConf

from rlscale.config.hydra.compose import make_loader
from rlscale.config.hydra.config_folders import PRIMARY, ConfigFolders
from rlscale.config.hydra.yaml_files import put_value
from rlscale.config.keys import keys
from rlscale.errors import ConfigError, Problem

ACTIONS = ("install", "uninstall", "query")


def run_completion(request: str, folders: ConfigFolders) -> None:
    """Prints the script that installs completion, or, for that script, what may follow a line.

    Args:
        request: `install=bash`, `uninstall=bash` or `query=bash`; also of zsh and fish.
        folders: where options lie.

    Raises: ConfigError when it is something else.
    """
    action, _, shell = request.partition("=")
    found: list[Any] = Plugins.instance().discover(CompletionPlugin)
    plugins = {plugin.provides(): plugin for plugin in found}
    if action not in ACTIONS or shell not in plugins:
        shells = "|".join(sorted(plugins))
        rule = f"be {'|'.join(ACTIONS)}=<{shells}>"
        fix = 'write eval "$(rlscale-train -sc install=bash)"'
        raise ConfigError([Problem(path="-sc", rule=rule, value=request or "nothing", fix=fix)])
    plugin = plugins[shell](_EveryKey(make_loader(folders)))
    if action == "query":
        plugin.query(PRIMARY)
    elif action == "install":
        plugin.install()
    else:
        plugin.uninstall()


class _EveryKey:
    """A loader for completion: groups and options are Hydra's, keys and their choices those of the dataclasses."""

    def __init__(self, loader: ConfigLoaderImpl) -> None:
        self._loader = loader

    def load_configuration(self, **_: Any) -> DictConfig:
        """Every key, nested; numbers have their default as the value to complete."""
        nested: dict[str, Any] = {}
        for key in keys().values():
            is_number = key.type in (int, float)
            put_value(nested, key.path, {} if key.is_mapping else key.default if is_number else None)
        return OmegaConf.create(nested)

    def get_group_options(self, group_name: str, results_filter: ObjectType, **_: Any) -> list[str]:
        """Options of a group; Hydra asks for what may follow `<key>=` in the same way."""
        key = keys().get(group_name)
        if key is not None and results_filter == ObjectType.CONFIG:
            return ["true", "false"] if key.type is bool else list(key.choices)
        # Without the words before it: they change no group, and one that is wrong would end completion.
        return list(self._loader.get_group_options(group_name, results_filter, PRIMARY, []))
