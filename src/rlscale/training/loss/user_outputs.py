"""What functions of the user give back: checked before it is used, with a message that names the function.

Shape legend: T tokens, S samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Real

import torch
from torch import Tensor

from rlscale.algo.ragged import Sums, TokenLayout, at_least_float32, check_shape

OF_THE_TRAINER = frozenset({"loss", "grad_norm", "lr", "kl_loss", "entropy"})
"""Metrics of a step that no function of the user may take the name of."""


def check_pair(given: object, *, path: str, what: str) -> tuple[object, object]:
    """The two parts of what a function gave: `what`, and its metrics. Raises ValueError for anything else."""
    if isinstance(given, tuple) and len(given) == 2:
        return given
    kind = f"a tuple of {len(given)}" if isinstance(given, tuple) else _kind(given)
    raise ValueError(f"{path} must return ({what}, metrics), got {kind}; without a metric return {{}} beside it")


def check_tensor(given: object, *, name: str, like: Tensor) -> Tensor:
    """A tensor of real numbers with shape and device of `like`. Raises ValueError for anything else."""
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} must be a tensor, got {_kind(given)}")
    check_shape(name, given, tuple(like.shape))
    if given.is_complex():
        raise ValueError(f"{name} must be of a real type, got {given.dtype}")
    if given.device != like.device:
        raise ValueError(
            f"{name} must be on {like.device}, got {given.device}; make it from the tensors that are given"
        )
    return given


def check_column(given: object, *, name: str, layout: TokenLayout) -> Tensor:
    """A number for each token, in float32 or better, finite at every trainable token. [T]

    Args:
        given: by the function.
        name: of the column, for messages, e.g. `the loss of my_loss:squared`.
        layout: samples and trainable tokens.

    Raises:
        ValueError: of another type, shape or device, or not finite at a trainable token; the message names a sample.
    """
    column_T = check_tensor(given, name=name, like=layout.mask_T)
    bad_T = layout.mask_T & ~torch.isfinite(column_T.detach())
    if bad_T.any():
        first = int(bad_T.nonzero()[0])
        raise ValueError(
            f"{name} must be finite at trainable tokens, got {float(column_T[first].detach())} in sample "
            f"{int(layout.sample_ids_T[first])}, the first of {int(bad_T.sum())} among {int(layout.num_trainable)}"
        )
    return at_least_float32(column_T)


def check_sums(given: object, *, path: str, like: Tensor, taken: Collection[str] = ()) -> Sums:
    """Metrics of a function: {name: (sum, count)}, each a finite number, plain or as a tensor of one element.

    Args:
        given: by the function.
        path: of the function.
        like: a tensor of the device where sums are added up.
        taken: names of metrics that are there already.

    Raises:
        ValueError: something else; the message names the metric.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"the metrics of {path} must be a mapping of names to (sum, count), got {_kind(given)}")
    found: Sums = {}
    for name, pair in given.items():
        where = f"the metric {name!r} of {path}"
        if not isinstance(name, str):
            raise ValueError(f"{where} must have a string as its name, got {_kind(name)}")
        if name in taken:
            raise ValueError(f"{where} must have another name: the trainer has one of that name")
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"{where} must be (sum, count), got {_kind(pair)}; TokenLayout.sum_and_count makes both")
        total, count = (_scalar(part, where=where, like=like) for part in pair)
        found[name] = total, count
    return found


def _scalar(given: object, *, where: str, like: Tensor) -> Tensor:
    if isinstance(given, Tensor) and given.numel() == 1 and not given.is_complex():
        value = given.detach().reshape(()).to(like.device)
    elif isinstance(given, Real):
        value = torch.tensor(float(given), device=like.device)
    else:
        raise ValueError(f"{where} must hold single numbers, got {_kind(given)}; sum over the tokens first")
    value = at_least_float32(value)
    if not torch.isfinite(value):
        raise ValueError(f"{where} must be finite, got {float(value)}; leave out tokens where tokens.mask is false")
    return value


def _kind(given: object) -> str:
    if isinstance(given, Tensor):
        return f"a tensor of shape {tuple(given.shape)}"
    return "None" if given is None else type(given).__name__
