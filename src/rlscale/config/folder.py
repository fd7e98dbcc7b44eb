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
    packaged = here.parents[1] / "_conf"
    return packaged if packaged.is_dir() else here.parents[3] / "conf"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFolders:
    """The folders that are searched for options, first match wins."""

    main: Path
    extra: Path | None = None

    @classmethod
    def find(cls, extra: Path | None = None) -> ConfigFolders:
        """Raises ConfigError when `extra` is no folder."""
        main = packaged_folder()
        assert main.is_dir(), f"the folder of the configuration files must exist, got {main}"
        if extra is not None and not extra.is_dir():
            fix = "it has folders like those of conf/, e.g. experiment/, with YAML files"
            raise ConfigError([Problem(path="--config-dir", rule="name an existing folder", value=str(extra), fix=fix)])
        return cls(main=main, extra=extra.resolve() if extra else None)

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.main,) if self.extra is None else (self.main, self.extra)

    def groups(self) -> dict[str, list[str]]:
        """The options of every group, sorted."""
        found: dict[str, set[str]] = {}
        for root in self.paths:
            for folder in (entry for entry in root.iterdir() if entry.is_dir()):
                found.setdefault(folder.name, set()).update(file.stem for file in folder.glob("*.yaml"))
        return {group: sorted(options) for group, options in sorted(found.items()) if options}

    def find_file(self, config_path: str) -> Path | None:
        """The file that Hydra calls `config_path` (e.g. `algo/gspo`); None when it is not one of ours."""
        return next((file for root in self.paths if (file := root / f"{config_path}.yaml").is_file()), None)


def short_path(file: Path) -> str:
    """Relative to the working folder where it lies below it."""
    relative = os.path.relpath(file)
    return str(file) if relative.startswith("..") else relative
