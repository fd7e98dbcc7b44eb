"""Group `run`: name and folder of the run."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import FOLDER_NAME, ConfigGroup


@dataclass(kw_only=True)
class IdentityConfig(ConfigGroup):
    """Name and folder of the run."""

    name: Annotated[str | None, Field(min_length=1, pattern=FOLDER_NAME)] = None
    """Name of the run and of its folder. None: the name of the experiment plus eight hex digits of a hash of the
    resolved config (without `run`, `logging` and `debug`), so equal settings get equal names.
    """

    dir: Annotated[str | None, Field(min_length=1)] = None
    """Folder for all files of the run. None: `runs/<run.name>`. If it contains an unfinished run, that run is resumed.
    """

    resume_changed: bool = False
    """Resume the unfinished run in `run.dir` even if its config differs from this one. false: print the changed keys
    and exit.
    """

    rehearsal: bool = False
    """Rehearse the run on the CPU of this machine: the same nodes, processes, parallel sizes, weight transfer and
    checkpoint, with a tiny random model of the same family and two rollouts. `on=rehearsal` sets it.
    """

    slime_modules: bool = False
    """Let your functions import `Sample`, `post`, `GenerateState` and more from the module paths of slime, which must
    not be installed. Functions that import no `slime` module need no such key.
    """

    experiment: str | None = None
    """Experiment that this config was composed from. Set by the command; a value given here has no effect."""

    config_dir: str | None = None
    """Folder passed as `--config-dir`. None: the option was not given. Set by the command; a value given here has no
    effect.
    """

    overrides: list[str] = field(default_factory=list)
    """Command-line arguments that this config was composed from. Set by the command; a value given here has no effect.
    """
