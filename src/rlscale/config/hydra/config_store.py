"""rlscale's groups for other Hydra applications: `rlscale.register()`.

    defaults:
      - rlscale/algo: grpo             # one typed group, as `config.rlscale.algo`

    defaults:
      - rlscale: run                   # all groups, typed, with their defaults
      - rlscale/experiment: quickstart
      - override rlscale/algo: gspo    # or `rlscale/algo=gspo` on the command line
      - _self_

Every name begins with `rlscale`, so that an application's own groups keep theirs. `config_from_hydra` checks what was
composed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.internals import YamlLoader
from rlscale.config.hydra.yaml_files import GLOBAL_GROUPS
from rlscale.config.keys import keys
from rlscale.config.passthrough import passthrough_groups
from rlscale.config.run_config import RunConfig
from rlscale.config.yaml_aliases import load_yaml

NAME = "rlscale"
WHOLE, SCHEMA = "run", "schema"
"""Options of the group `rlscale`: all groups, and their types alone."""


def register() -> None:
    """Registers rlscale's groups with Hydra in this process. Call it before `hydra.main` or `hydra.compose`.

    Adds to Hydra's ConfigStore the group `rlscale`, with the options `run` and `schema`, and a group `rlscale/<group>`
    for every group, experiments and overlays included; and the folder `conf/` to the end of the search path, for
    applications that use its groups under their plain names.

    Example:
        rlscale.register()

        @hydra.main(version_base="1.3", config_path="conf", config_name="app")
        def main(config: DictConfig) -> None:
            rlscale.Trainer(rlscale.config_from_hydra(config.rlscale)).run()
    """
    store, folders = ConfigStore.instance(), ConfigFolders.find()
    options = {group: names for group, names in folders.groups().items() if group not in GLOBAL_GROUPS}
    owners = {key.group: key.owner for key in keys().values() if key.path.count(".") == 1}
    store.store(group=NAME, name=SCHEMA, node=RunConfig, provider=NAME)
    # Groups are relative to that of the entry: `algo` is rlscale/algo. `null` selects no option, and can be overridden.
    whole = [SCHEMA, *({group: None} for group in options), "_self_"]
    store.store(group=NAME, name=WHOLE, node={"defaults": whole}, provider=NAME)
    for group, owner in owners.items():
        store.store(group=f"{NAME}/{group}", name=SCHEMA, node=owner, provider=NAME)
        for option in options.get(group, ()):
            node = _group_option(folders, group, option)
            store.store(group=f"{NAME}/{group}", name=option, node=node, provider=NAME)
    for group in GLOBAL_GROUPS:
        for option in folders.groups()[group]:
            node = _global_option(folders, group, option)
            store.store(group=f"{NAME}/{group}", name=option, node=node, package="_global_", provider=NAME)
    Plugins.instance().register(ConfFolder)


class ConfFolder(SearchPathPlugin):
    """Appends `conf/` to the search path of an application; its own files come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        known = {str(element.path).removeprefix("file://") for element in search_path.get_path()}
        for folder in map(str, ConfigFolders.find().paths):
            # The loader of rlscale's own commands has it as the main folder.
            if folder not in known:
                search_path.append(NAME, f"file://{folder}")


def _group_option(folders: ConfigFolders, group: str, option: str) -> dict[str, Any]:
    """The values of an option, on top of the types of its group or of the option that it extends."""
    values = _read(folders, group, option)
    parents = [entry for entry in values.pop("defaults", []) if entry != "_self_"]
    return {"defaults": [*(parents or [SCHEMA]), "_self_"], **_typed(group, values)}


def _global_option(folders: ConfigFolders, group: str, option: str) -> dict[str, Any]:
    """An experiment or overlay: its values, and its choices in the groups below `rlscale`."""
    values = _read(folders, group, option)
    entries = values.pop("defaults", [])
    parents = [entry for entry in entries if isinstance(entry, str) and entry != "_self_"]
    choices: list[dict[str, Any]] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((name, choice),) = entry.items()
            choices.append({f"override /{NAME}/{name.split('/')[-1]}": choice})
    body = {name: _typed(name, value) if isinstance(value, dict) else value for name, value in values.items()}
    if group == "experiment":
        # rlscale's own commands record it, too: it is a part of the run's name.
        body["run"] = {**body.get("run", {}), "experiment": option}
    # Hydra wants the overrides at the end of the list.
    return {"defaults": [*parents, "_self_", *choices], NAME: body}


def _read(folders: ConfigFolders, group: str, option: str) -> dict[str, Any]:
    file = folders.find_file(f"{group}/{option}")
    assert file is not None, f"{group}/{option} must be a file of {folders.main}"
    return _load_yaml(file)


def _load_yaml(file: Path) -> dict[str, Any]:
    values = load_yaml(file.read_text(encoding="utf-8"), YamlLoader)
    assert isinstance(values, dict), f"{file} must contain a mapping"
    return values


def _typed(group: str, values: dict[str, Any]) -> dict[str, Any]:
    """Moves arguments of a library, which are no fields of the dataclass, to the field that contains them."""
    field = passthrough_groups().get(group)
    if field is None:
        return values
    arguments = {name: value for name, value in values.items() if f"{group}.{name}" not in keys()}
    own = {name: value for name, value in values.items() if name not in arguments}
    return own | ({field: arguments} if arguments else {})
