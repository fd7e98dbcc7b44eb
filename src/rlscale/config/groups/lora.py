"""Group `train.lora`: low-rank adapters."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


@dataclass(kw_only=True)
class LoraConfig(ConfigGroup):
    """Adapters of low rank beside the weights, which alone are trained (LoRA, 2106.09685), by peft.

    A weight W acts as W + alpha / rank * B A. Engines and the export get the sum; the adapters are saved in peft's
    format in `adapter` below the export. They have no dropout: old and new logprobs are those of one function.
    """

    rank: Annotated[
        int, Field(ge=0, description="Rank of the adapters. 0: there are none, and the weights themselves are trained.")
    ] = 0
    alpha: Annotated[int, Field(gt=0, description="The adapters' part is multiplied by alpha / rank.")] = 32
    target_modules: Annotated[
        list[str] | None,
        Field(
            min_length=1,
            description="Last names of the linear layers that get adapters, e.g. `[q_proj, v_proj]`. None: all linear "
            "layers but the output layer.",
        ),
    ] = None
    load: Annotated[
        str | None,
        Field(min_length=1, description="Folder in peft's format to take the first adapters from. None: new ones."),
    ] = None
