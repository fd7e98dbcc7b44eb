"""RMS norm of hidden states, with a live weight."""

from torch import Tensor

from rlscale.models.decoder_ops import rms_norm


class HiddenNorm:
    """RMS norm over the last axis, times a weight."""

    def __init__(self, weight: Tensor, *, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight, eps=self._eps)
