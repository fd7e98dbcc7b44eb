"""Group `run`: what a run is called and where its folder is."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class IdentityConfig(ConfigGroup):
    """Name and folder of the run."""

    name: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Name of the run. None: the experiment's name and eight hex digits of a hash of the resolved "
            "config (without `run`, `logging` and `debug`), so the same settings always get the same name.",
        ),
    ] = None
    dir: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Folder that holds all files of the run. None: `runs/<run.name>`. An unfinished run in that "
            "folder is resumed.",
        ),
    ] = None
    resume_changed: Annotated[
        bool,
        Field(
            description="Resume an unfinished run in `run.dir` although its config was another one. false: the changed "
            "keys are named and nothing is started."
        ),
    ] = False
    experiment: Annotated[
        str | None,
        Field(description="Experiment this config was composed from. The command sets it; setting it has no effect."),
    ] = None
    config_dir: Annotated[
        str | None,
        Field(
            description="Folder of the command's `--config-dir`. None: it had none. The command sets it; "
            "setting it has no effect."
        ),
    ] = None
    overrides: Annotated[
        list[str],
        Field(description="Command line this config was composed from. The command sets it; setting it has no effect."),
    ] = field(default_factory=list)
