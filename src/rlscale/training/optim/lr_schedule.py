"""Learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rlscale.config import LrDecayStyle, OptimConfig, WsdDecayStyle

_DECAYS: dict[LrDecayStyle | WsdDecayStyle, Callable[[float], float]] = {
    LrDecayStyle.constant: lambda progress: 1.0,
    LrDecayStyle.linear: lambda progress: 1.0 - progress,
    LrDecayStyle.cosine: lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    WsdDecayStyle.exponential: lambda progress: 2.0 * 0.5**progress - 1.0,
    WsdDecayStyle.minus_sqrt: lambda progress: 1.0 - math.sqrt(progress),
}
"""From the finished part of the decay, 0 to 1, to the factor between floor and peak, 1 to 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LrSchedule:
    """Rises to the peak in `warmup_steps` equal increments, then decays until `decay_steps`.

    With w = warmup_steps, d = decay_steps and steps s = 0, 1, ...: peak * (s + 1) / w for s < w, so that step w - 1 is
    the first at the peak and no step has a rate of 0; then floor + (peak - floor) * decay(p) with
    p = min((s - w) / (d - w), 1). The decays of p:

        linear 1 - p;  cosine (1 + cos(pi p)) / 2;  polynomial (1 - p)^power
        wsd [MiniCPM, 2404.06395]: 1, and in the last n = fall_steps of the d steps a fall in q = (s - (d - n)) / n:
            linear and cosine as above, exponential 2 * 0.5^q - 1, minus_sqrt 1 - sqrt(q) [2405.18392]

    inverse_square_root [1706.03762]: max(floor, peak * sqrt(max(w, 1) / (s + 1))), and the floor from step d on.

    Example:
        LrSchedule.from_config(OptimConfig(lr=1e-3, lr_warmup_iters=2), total_steps=10).at(0)  # 5e-4
    """

    peak: float
    floor: float
    warmup_steps: int
    decay_steps: int
    style: LrDecayStyle
    power: float = 2.0
    fall_steps: int = 1  # of wsd
    fall: WsdDecayStyle = WsdDecayStyle.minus_sqrt

    @classmethod
    def from_config(cls, optim: OptimConfig, *, total_steps: int) -> LrSchedule:
        """`total_steps` are the optimiser steps of the whole run. `optim.lr` must be resolved."""
        assert optim.lr is not None, "optim.lr is set when the config is resolved"
        peak = optim.lr if optim.init_lr_frac is None else optim.lr * optim.init_lr_frac
        constant = optim.lr_decay_style == LrDecayStyle.constant
        decay_steps = optim.lr_decay_iters or total_steps
        return cls(
            peak=peak,
            floor=0.0 if constant else min(optim.min_lr, peak),
            warmup_steps=optim.lr_warmup_iters or math.ceil(total_steps * (optim.warmup_ratio or 0.0)),
            decay_steps=decay_steps,
            style=optim.lr_decay_style,
            power=optim.lr_decay_power,
            fall_steps=optim.lr_wsd_decay_iters or math.ceil(decay_steps / 10),
            fall=optim.lr_wsd_decay_style,
        )

    def at(self, step: int) -> float:
        """Learning rate of the optimiser step with this 0-based number."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.style == LrDecayStyle.inverse_square_root:
            rate = self.peak * math.sqrt(max(self.warmup_steps, 1) / (step + 1))
            return self.floor if step >= self.decay_steps else max(self.floor, rate)
        return self.floor + (self.peak - self.floor) * self._decay(step)

    def _decay(self, step: int) -> float:
        progress = _progress(step - self.warmup_steps, self.decay_steps - self.warmup_steps)
        if self.style == LrDecayStyle.wsd:
            # A fall that is longer than the decay starts with it.
            num_steps = min(self.fall_steps, self.decay_steps - self.warmup_steps)
            return _DECAYS[self.fall](_progress(step - (self.decay_steps - num_steps), num_steps))
        if self.style == LrDecayStyle.polynomial:
            return float((1.0 - progress) ** self.power)
        return _DECAYS[self.style](progress)


def _progress(done: int, total: int) -> float:
    return min(max(done / total, 0.0), 1.0) if total > 0 else 1.0
