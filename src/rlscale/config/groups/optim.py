"""Group `optim`: optimiser and learning-rate schedule."""

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
    """Learning-rate schedules after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    polynomial = "polynomial"
    inverse_square_root = "inverse_square_root"
    wsd = "wsd"


class WsdDecayStyle(StrEnum):
    """Shapes of the final decay of the wsd schedule."""

    linear = "linear"
    cosine = "cosine"
    exponential = "exponential"
    minus_sqrt = "minus_sqrt"


@dataclass(kw_only=True)
class OptimConfig(ConfigGroup):
    """Optimiser and learning-rate schedule."""

    name: OptimizerName = OptimizerName.adam
    """Optimiser. `adam`: fused AdamW. `deepspeed_cpu_adam`: AdamW with its moments in host memory and its step on the
    CPU, which saves GPU memory. `muon`: Muon for the matrices inside layers, AdamW for embedding, output layer and
    vectors.
    """

    # Learning-rate schedule.
    lr: Annotated[float | None, Field(ge=0)] = None
    """Peak learning rate. 0: no weight changes (a control run). None: 2e-5 with `train.backend=fsdp`, 1e-6 with
    `train.backend=megatron`.
    """

    lr_decay_style: LrDecayStyle = LrDecayStyle.constant
    """Schedule of the learning rate after the warm-up."""

    warmup_ratio: Annotated[float | None, Field(ge=0, le=1)] = None
    """Fraction of all optimiser steps with linear warm-up from 0. None: 0 with `optim.lr_warmup_iters`, else 0.03 with
    `train.backend=fsdp` and 0 with `train.backend=megatron`.
    """

    lr_warmup_iters: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps of the linear warm-up. 0: computed from `optim.warmup_ratio`."""

    lr_decay_iters: Annotated[int | None, Field(gt=0)] = None
    """Optimiser steps, including warm-up, after which `optim.min_lr` is reached. None: all steps of the run. No effect
    with `optim.lr_decay_style=constant`.
    """

    lr_decay_power: Annotated[float, Field(gt=0)] = 2.0
    """Exponent of the polynomial schedule; 1 is linear. Only with `optim.lr_decay_style=polynomial`."""

    lr_wsd_decay_iters: Annotated[int | None, Field(gt=0)] = None
    """Optimiser steps of the final decay of the wsd schedule; before it the rate is constant. None: a tenth of
    `optim.lr_decay_iters`. Only with `optim.lr_decay_style=wsd`.
    """

    lr_wsd_decay_style: WsdDecayStyle = WsdDecayStyle.minus_sqrt
    """Shape of the final decay of the wsd schedule. Only with `optim.lr_decay_style=wsd`."""

    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of the decay. No effect with `optim.lr_decay_style=constant`."""

    # Optimiser constants.
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam beta1: decay of the first moment."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Adam beta2: decay of the second moment."""

    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam epsilon, added to the denominator."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay. Each step subtracts rate * weight decay * weight."""

    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Nesterov momentum of Muon. Only with `optim.name=muon`."""

    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Maximum norm of the gradient; larger gradients are scaled down. 0: off."""

    # Learning rates by kind of parameter.
    matrix_lr: Annotated[float | None, Field(ge=0)] = None
    """Peak learning rate of the matrices inside layers. None: `optim.lr`."""

    embedding_lr: Annotated[float | None, Field(ge=0)] = None
    """Peak learning rate of the embedding. If embedding and output layer are tied, the smaller of this and
    `optim.unembedding_lr` is used. None: `optim.lr`.
    """

    unembedding_lr: Annotated[float | None, Field(ge=0)] = None
    """Peak learning rate of the output layer. None: `optim.lr`."""

    init_lr_frac: Annotated[float | None, Field(gt=0, le=1)] = None
    """Factor on all learning rates, for the whole run. None: 1."""
