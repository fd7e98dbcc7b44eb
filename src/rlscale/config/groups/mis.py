"""Group `algo.mis`: masked importance sampling."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


class MisLevel(StrEnum):
    """What a ratio of trainer to engine is taken of."""

    token = "token"
    sequence = "sequence"
    geometric = "geometric"


class MisMode(StrEnum):
    """What happens to weights outside of their band."""

    truncate = "truncate"
    clip = "clip"
    mask = "mask"


@dataclass(kw_only=True)
class MisConfig(ConfigGroup):
    """Masked importance sampling; all of it needs `algo.use_tis` and `algo.tis_type=mis`."""

    level: Annotated[
        MisLevel,
        Field(
            description="`token`: every token has its own ratio. `sequence`: the product over the response. "
            "`geometric`: its geometric mean."
        ),
    ] = MisLevel.token
    mode: Annotated[
        MisMode,
        Field(
            description="`truncate`: weights are at most `algo.tis_clip`. `clip`: and at least `algo.mis.low`. `mask`: "
            "0 outside of the two."
        ),
    ] = MisMode.truncate
    low: Annotated[float | None, Field(ge=0, description="Lower bound of a weight. None: 1 / `algo.tis_clip`.")] = None
    reject_level: Annotated[
        MisLevel | None,
        Field(
            description="Drop from the loss what has a ratio of this level outside of `algo.mis.reject_low` and "
            "`algo.mis.reject_high`: tokens, or whole responses. None: nothing."
        ),
    ] = None
    reject_low: Annotated[float | None, Field(ge=0, description="Lower end of that band. None: 1 / its upper end.")] = (
        None
    )
    reject_high: Annotated[float | None, Field(gt=0, description="Upper end of that band. None: `algo.tis_clip`.")] = (
        None
    )
    veto: Annotated[
        float | None,
        Field(
            gt=0,
            description="Drop from the loss a response with any token whose ratio is below this, e.g. 1e-4. None: off.",
        ),
    ] = None
    normalize: Annotated[
        bool,
        Field(
            description="Divide the weights by their mean over the rollout: over its tokens, or with a level of "
            "sequences over its samples. Needs the trainer's logprobs beforehand, so their pass is not saved."
        ),
    ] = False
