"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rlscale.config import LrDecayStyle, OptimConfig

_DECAYS: dict[LrDecayStyle, Callable[[float], float]] = {
    LrDecayStyle.constant: lambda progress: 1.0,
    LrDecayStyle.linear: lambda progress: 1.0 - progress,
    LrDecayStyle.cosine: lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LrSchedule:
    """Rises in `warmup_steps` equal parts to the peak, then decays until `decay_steps`.

    With w = warmup_steps, d = decay_steps and steps s = 0, 1, ...: peak * (s + 1) / w for s < w, so that step w - 1 is
    the first at the peak and no step is made at rate 0; then floor + (peak - floor) * decay(min((s - w) / (d - w), 1)).

    Example:
        LrSchedule.from_config(OptimConfig(lr=1e-3, lr_warmup_iters=2), total_steps=10).at(0)  # 5e-4
    """

    peak: float
    floor: float
    warmup_steps: int
    decay_steps: int
    style: LrDecayStyle

    @classmethod
    def from_config(cls, optim: OptimConfig, *, total_steps: int) -> LrSchedule:
        """`total_steps` are the optimiser steps of the whole run. `optim.lr` must be resolved."""
        assert optim.lr is not None, "optim.lr is set when the config is resolved"
        assert optim.lr_decay_style in _DECAYS, f"the config refuses optim.lr_decay_style={optim.lr_decay_style}"
        peak = optim.lr if optim.init_lr_frac is None else optim.lr * optim.init_lr_frac
        constant = optim.lr_decay_style == LrDecayStyle.constant
        return cls(
            peak=peak,
            floor=0.0 if constant else min(optim.min_lr, peak),
            warmup_steps=optim.lr_warmup_iters or math.ceil(total_steps * optim.warmup_ratio),
            decay_steps=optim.lr_decay_iters or total_steps,
            style=optim.lr_decay_style,
        )

    def at(self, step: int) -> float:
        """The rate of the optimiser step with this 0-based number."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        remaining = self.decay_steps - self.warmup_steps
        progress = min((step - self.warmup_steps) / remaining, 1.0) if remaining > 0 else 1.0
        return self.floor + (self.peak - self.floor) * _DECAYS[self.style](progress)
