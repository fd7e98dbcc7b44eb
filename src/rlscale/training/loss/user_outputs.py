"""Checks of what functions of the user return, with messages that name the function.

Shape legend: T tokens, S samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Real

import torch
from torch import Tensor

from rlscale.algo.ragged import Sums, TokenLayout, at_least_float32, check_shape

STEP_METRICS = frozenset({"loss", "grad_norm", "lr", "kl_loss", "teacher_kl", "entropy"})
"""Metrics of a step by the trainer. A function of the user must not return one of these names."""


def check_pair(returned: object, *, path: str, what: str) -> tuple[object, object]:
    """The two parts of a returned value: `what`, and the metrics. Raises ValueError for anything else."""
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    kind = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else _kind(returned)
    raise ValueError(f"{path} must return ({what}, metrics), got {kind}; without a metric return {{}} as the second")


def check_tensor(returned: object, *, name: str, like: Tensor) -> Tensor:
    """A tensor of real numbers with shape and device of `like`. Raises ValueError for anything else."""
    if not isinstance(returned, Tensor):
        raise ValueError(f"{name} must be a tensor, got {_kind(returned)}")
    check_shape(name, returned, tuple(like.shape))
    if returned.is_complex():
        raise ValueError(f"{name} must have a real dtype, got {returned.dtype}")
    if returned.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {returned.device}; compute it from the given tensors")
    return returned


def check_column(returned: object, *, name: str, layout: TokenLayout) -> Tensor:
    """One number per token, in float32 or float64, finite at every trainable token. [T]

    Args:
        returned: by the function.
        name: of the column, for messages, e.g. `the loss of my_loss:squared`.
        layout: samples and trainable tokens.

    Raises:
        ValueError: of another type, shape or device, or not finite at a trainable token; the message names a sample.
    """
    column_T = check_tensor(returned, name=name, like=layout.mask_T)
    # Masked tokens may have any value: it is replaced by 0 before it is used.
    bad_T = layout.mask_T & ~torch.isfinite(column_T.detach())
    if bad_T.any():
        first = int(bad_T.nonzero()[0])
        raise ValueError(
            f"{name} must be finite at trainable tokens, got {float(column_T[first].detach())} in sample "
            f"{int(layout.sample_ids_T[first])}, the first of {int(bad_T.sum())} among {int(layout.num_trainable)}"
        )
    return at_least_float32(column_T)


def check_sums(returned: object, *, path: str, like: Tensor, taken: Collection[str] = ()) -> Sums:
    """Metrics of a function: {name: (sum, count)}, each a finite number, plain or as a tensor of one element.

    Args:
        returned: by the function.
        path: of the function.
        like: a tensor on the device where sums are added up.
        taken: names of metrics that already exist.

    Raises:
        ValueError: something else; the message names the metric.
    """
    if not isinstance(returned, Mapping):
        raise ValueError(f"the metrics of {path} must be a mapping of names to (sum, count), got {_kind(returned)}")
    sums: Sums = {}
    for name, pair in returned.items():
        where = f"the metric {name!r} of {path}"
        if not isinstance(name, str):
            raise ValueError(f"{where} must have a string as its name, got {_kind(name)}")
        if name in taken:
            raise ValueError(f"{where} must have another name: the trainer has a metric of that name")
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"{where} must be (sum, count), got {_kind(pair)}; TokenLayout.sum_and_count returns both")
        total, count = (_scalar(part, where=where, like=like) for part in pair)
        sums[name] = total, count
    return sums


def _scalar(value: object, *, where: str, like: Tensor) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        scalar = value.detach().reshape(()).to(like.device)
    elif isinstance(value, Real):
        scalar = torch.tensor(float(value), device=like.device)
    else:
        raise ValueError(f"{where} must hold single numbers, got {_kind(value)}; sum over the tokens first")
    scalar = at_least_float32(scalar)
    if not torch.isfinite(scalar):
        raise ValueError(f"{where} must be finite, got {float(scalar)}; exclude tokens where tokens.mask is false")
    return scalar


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else type(value).__name__
