"""Folders of the YAML files, and the groups and options in them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlscale.errors import ConfigError, Problem

PRIMARY = "config"


def packaged_folder() -> Path:
    """The folder `conf`: the copy inside an installed package, else that of the repository."""
    here = Path(__file__).resolve()
    # src/rlscale/config/hydra/config_folders.py: two levels up is the package, four the repository.
    packaged = here.parents[2] / "_conf"
    return packaged if packaged.is_dir() else here.parents[4] / "conf"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFolders:
    """The folders that are searched for options; the first match is used."""

    main: Path
    extra: Path | None = None

    @classmethod
    def find(cls, extra: Path | None = None) -> ConfigFolders:
        """Finds the folders; raises ConfigError when `extra` has no options, or one with the name of another."""
        main = packaged_folder()
        assert main.is_dir(), f"the folder of the configuration files must exist, got {main}"
        if extra is not None and (problems := _folder_problems(extra, main)):
            raise ConfigError(problems)
        return cls(main=main, extra=extra.resolve() if extra else None)

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.main,) if self.extra is None else (self.main, self.extra)

    def state(self) -> tuple[tuple[str, int, int], ...]:
        """Path, time of the last change (ns) and size of every YAML file; equal while no file changes."""
        files = (file for root in self.paths for file in _yaml_entries(str(root)))
        return tuple(sorted((file.path, (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files))

    def groups(self) -> dict[str, list[str]]:
        """The options of every group, in natural order: tp2 before tp16."""
        found: dict[str, set[str]] = {}
        for root in self.paths:
            for folder in _group_folders(root, self.main):
                names = (name for name in os.listdir(folder) if name.endswith(".yaml"))
                found.setdefault(folder.name, set()).update(name.removesuffix(".yaml") for name in names)
        return {group: sorted(options, key=natural_order) for group, options in sorted(found.items()) if options}

    def find_file(self, config_path: str) -> Path | None:
        """The file of `config_path`, as Hydra names it (e.g. `algo/gspo`); None when it is not in these folders."""
        return next((file for root in self.paths if (file := root / f"{config_path}.yaml").is_file()), None)


def _yaml_entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """The YAML files in `folder` and below. Every config asks for them, and pathlib takes three times as long."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.name.endswith(".yaml"):
                yield entry
            elif entry.is_dir():
                yield from _yaml_entries(entry.path)


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Key that sorts numbers within names by their value."""
    # Splitting at a captured number leaves texts at even and numbers at odd places, so equal places have equal types.
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def _group_folders(root: Path, main: Path) -> list[Path]:
    """The folders of `root` that are groups, i.e. that are in `main` too."""
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and (main / entry.name).is_dir())


def _folder_problems(extra: Path, main: Path) -> list[Problem]:
    """Problems of a user's folder of options."""
    fix = "it needs folders like those in conf/, e.g. experiment/, with YAML files"
    if not extra.is_dir():
        return [Problem(path="--config-dir", rule="name an existing folder", value=str(extra), fix=fix)]
    groups = _group_folders(extra, main)
    if not groups:
        rule = "name a folder that contains group folders"
        return [Problem(path="--config-dir", rule=rule, value=str(extra), fix=fix)]
    return [
        Problem(
            path=f"{folder.name}={file.stem}",
            rule="have a unique name",
            value=short_path(file),
            fix="rlscale has an option of this name, which would be used instead; rename the file",
        )
        for folder in groups
        for file in sorted(folder.glob("*.yaml"))
        # A copy of one of our files, as in a copied conf/, is allowed.
        if (own := main / folder.name / file.name).is_file() and own.read_bytes() != file.read_bytes()
    ]


def short_path(file: Path) -> str:
    """The path relative to the working folder if it is below it."""
    relative = os.path.relpath(file)
    return str(file) if relative.startswith("..") else relative
