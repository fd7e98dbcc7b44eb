"""Group `optim`: the optimiser and its schedule."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup


class OptimizerName(StrEnum):
    """Optimisers."""

    adam = "adam"
    deepspeed_cpu_adam = "deepspeed_cpu_adam"
    muon = "muon"


class LrDecayStyle(StrEnum):
    """Shapes of the learning rate after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    polynomial = "polynomial"
    inverse_square_root = "inverse_square_root"
    wsd = "wsd"


class WsdDecayStyle(StrEnum):
    """Shapes of the last part of the schedule `wsd`."""

    linear = "linear"
    cosine = "cosine"
    exponential = "exponential"
    minus_sqrt = "minus_sqrt"


@dataclass(kw_only=True)
class OptimConfig(ConfigGroup):
    """Optimiser and learning-rate schedule."""

    name: Annotated[
        OptimizerName,
        Field(
            description="Optimiser. `adam`: AdamW, fused. `deepspeed_cpu_adam`: the same with its moments in host "
            "memory and its step on the CPU, for GPUs that are too small. `muon`: Muon for the matrices inside layers, "
            "AdamW for embedding, output layer and vectors."
        ),
    ] = OptimizerName.adam
    lr: Annotated[
        float | None,
        Field(
            ge=0,
            description="Peak learning rate. 0 changes no weight (a control run). None: 2e-5 with "
            "`train.backend=fsdp`, 1e-6 with `megatron`.",
        ),
    ] = None
    lr_decay_style: Annotated[LrDecayStyle, Field(description="Course of the learning rate after the warm-up.")] = (
        LrDecayStyle.constant
    )
    warmup_ratio: Annotated[
        float,
        Field(ge=0, le=1, description="Part of all optimiser steps over which the learning rate rises from 0."),
    ] = 0.03
    lr_warmup_iters: Annotated[
        int,
        Field(ge=0, description="Optimiser steps over which the learning rate rises. 0: `optim.warmup_ratio` decides."),
    ] = 0
    lr_decay_iters: Annotated[
        int | None,
        Field(gt=0, description="Optimiser steps, warm-up included, after which `optim.min_lr` is reached. None: all."),
    ] = None
    lr_decay_power: Annotated[
        float, Field(gt=0, description="Exponent of the schedule `polynomial`: 1 is a straight line.")
    ] = 2.0
    lr_wsd_decay_iters: Annotated[
        int | None,
        Field(
            gt=0,
            description="Last optimiser steps of the schedule `wsd`, in which the rate falls; before it stays at the "
            "peak. None: a tenth of the decay.",
        ),
    ] = None
    lr_wsd_decay_style: Annotated[WsdDecayStyle, Field(description="Course of the fall at the end of `wsd`.")] = (
        WsdDecayStyle.minus_sqrt
    )
    min_lr: Annotated[
        float, Field(ge=0, description="The decay ends at this learning rate. Ignored with a constant one.")
    ] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1, description="Adam's decay of the gradient mean.")] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1, description="Adam's decay of the squared gradient.")] = 0.95
    adam_eps: Annotated[float, Field(gt=0, description="Added to Adam's denominator.")] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, description="Decoupled weight decay per step, times the rate.")] = 0.0
    muon_momentum: Annotated[
        float, Field(ge=0, lt=1, description="Muon's decay of the gradient mean; Nesterov's step looks ahead by it.")
    ] = 0.95
    clip_grad: Annotated[
        float, Field(ge=0, description="Largest norm of the whole gradient; a longer one is scaled down. 0: off.")
    ] = 1.0
    matrix_lr: Annotated[
        float | None, Field(ge=0, description="Peak learning rate of the matrices inside layers. None: `optim.lr`.")
    ] = None
    embedding_lr: Annotated[
        float | None,
        Field(
            ge=0,
            description="Peak learning rate of the embedding. One that is the output layer as well (tied) has the "
            "smaller of this and `optim.unembedding_lr`. None: `optim.lr`.",
        ),
    ] = None
    unembedding_lr: Annotated[
        float | None, Field(ge=0, description="Peak learning rate of the output layer. None: `optim.lr`.")
    ] = None
    init_lr_frac: Annotated[
        float | None,
        Field(gt=0, le=1, description="All learning rates are this share of what is given, from the start. None: 1."),
    ] = None
