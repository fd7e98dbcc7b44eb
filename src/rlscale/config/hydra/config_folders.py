"""Where the YAML files are, and which groups and options they offer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rlscale.errors import ConfigError, Problem

PRIMARY = "config"


def packaged_folder() -> Path:
    """The `conf` folder: the copy inside an installed package, else the repository's."""
    here = Path(__file__).resolve()
    packaged = here.parents[2] / "_conf"
    return packaged if packaged.is_dir() else here.parents[4] / "conf"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFolders:
    """The folders that are searched for options, first match wins."""

    main: Path
    extra: Path | None = None

    @classmethod
    def find(cls, extra: Path | None = None) -> ConfigFolders:
        """Raises ConfigError when `extra` is no folder with options, or has one that would never be read."""
        main = packaged_folder()
        assert main.is_dir(), f"the folder of the configuration files must exist, got {main}"
        if extra is not None and (problems := _wrong_folder(extra, main)):
            raise ConfigError(problems)
        return cls(main=main, extra=extra.resolve() if extra else None)

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.main,) if self.extra is None else (self.main, self.extra)

    def groups(self) -> dict[str, list[str]]:
        """The options of every group, sorted."""
        found: dict[str, set[str]] = {}
        for root in self.paths:
            for folder in _group_folders(root, self.main):
                found.setdefault(folder.name, set()).update(file.stem for file in folder.glob("*.yaml"))
        return {group: sorted(options) for group, options in sorted(found.items()) if options}

    def find_file(self, config_path: str) -> Path | None:
        """The file that Hydra calls `config_path` (e.g. `algo/gspo`); None when it is not one of ours."""
        return next((file for root in self.paths if (file := root / f"{config_path}.yaml").is_file()), None)


def _group_folders(root: Path, main: Path) -> list[Path]:
    """The folders of `root` that are groups: those there are in `main`."""
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and (main / entry.name).is_dir())


def _wrong_folder(extra: Path, main: Path) -> list[Problem]:
    """What is wrong with a user's folder of options."""
    fix = "it has folders like those of conf/, e.g. experiment/, with YAML files"
    if not extra.is_dir():
        return [Problem(path="--config-dir", rule="name an existing folder", value=str(extra), fix=fix)]
    groups = _group_folders(extra, main)
    if not groups:
        rule = "name a folder with folders of groups in it"
        return [Problem(path="--config-dir", rule=rule, value=str(extra), fix=fix)]
    return [
        Problem(
            path=f"{folder.name}={file.stem}",
            rule="have a name of its own",
            value=short_path(file),
            fix="an option of this name comes with rlscale and would be read instead; rename the file",
        )
        for folder in groups
        for file in sorted(folder.glob("*.yaml"))
        if (own := main / folder.name / file.name).is_file() and own.read_bytes() != file.read_bytes()
    ]


def short_path(file: Path) -> str:
    """Relative to the working folder where it lies below it."""
    relative = os.path.relpath(file)
    return str(file) if relative.startswith("..") else relative
