"""What a response costs for being too long."""

from torch import Tensor


def overlong_penalty(lengths_S: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft punishment, arXiv:2503.14476, equation 13: 0 up to max_length - buffer, then linear to -1.

    Args:
        lengths_S: tokens of each response. [S]
        max_length: where the penalty is -1; beyond it too.
        buffer: tokens over which it grows, within [1, max_length].

    Returns:
        What is to be added to the reward, within [-1, 0]. [S] float32
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer must be within [1, {max_length}], got {buffer}")
    return -((lengths_S - (max_length - buffer)).float() / buffer).clamp(0.0, 1.0)
