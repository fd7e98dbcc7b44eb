"""Group `logging`: metrics and the console."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.group import ConfigGroup


class ConsoleMode(StrEnum):
    """How a run shows itself."""

    auto = "auto"
    live = "live"
    plain = "plain"
    none = "none"


@dataclass(kw_only=True)
class LoggingConfig(ConfigGroup):
    """Where metrics go."""

    interval: Annotated[int, Field(gt=0, description="Show every this many rollouts; the metrics file has all.")] = 1
    console: Annotated[
        ConsoleMode,
        Field(
            description="`live`: a table that is redrawn. `plain`: a line per rollout. `none`: nothing. `auto`: live "
            "on a terminal, else plain."
        ),
    ] = ConsoleMode.auto
