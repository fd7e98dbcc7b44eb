"""RMS norm of hidden states, with a live weight."""

from torch import Tensor

from rlscale.models.decoder_ops import rms_norm


class HiddenNorm:
    """RMS norm over the last axis, times a weight, or with `is_zero_centered` times 1 + weight."""

    def __init__(self, weight: Tensor, *, eps: float, is_zero_centered: bool = False) -> None:
        self._weight, self._eps, self._is_zero_centered = weight, eps, is_zero_centered

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_zero_centered:
            # In float32 as in transformers: 1 + weight would be rounded.
            return rms_norm(x.float(), 1 + self._weight.float(), eps=self._eps).to(x.dtype)
        return rms_norm(x, self._weight, eps=self._eps)
