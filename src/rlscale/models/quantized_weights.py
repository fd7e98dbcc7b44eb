"""Low-precision weights as named tensors, for a weight sync and for engines. See `architectures/low_precision.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from rlscale.algo.quantization import dequantize_fp8, dequantize_int4, quantize_fp8, quantize_int4
from rlscale.architectures.low_precision import is_quantized

Named = tuple[str, Tensor]


def quantize_weights(weights: Iterable[Named], precision: str) -> Iterator[Named]:
    """Replaces each weight that is quantised by its tensors, in the order of the weights."""
    for name, weight in weights:
        if is_quantized(name):
            yield from encode_weight(name, weight, precision).items()
        else:
            yield name, weight


def encode_weight(name: str, weight_OI: Tensor, precision: str) -> dict[str, Tensor]:
    """The tensors of one quantised weight by name: values, scales, and with int4 the shape.

    Args:
        name: of the weight.
        weight_OI: a matrix, or stacked experts [E, I, O].
        precision: `fp8` or `int4`.

    Raises ValueError for a width that int4 groups do not divide; the message names the weight.
    """
    if precision == "fp8":
        # A block has as many rows as columns, so transposed matrices need no other scales.
        values, scales = _for_each_matrix(quantize_fp8, weight_OI)
        return {name: values, f"{name}_scale_inv": scales}
    matrices = weight_OI.transpose(1, 2).contiguous() if weight_OI.dim() == 3 else weight_OI
    try:
        words, scales = _for_each_matrix(quantize_int4, matrices)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    shape = torch.tensor(matrices.shape, dtype=torch.int64, device=weight_OI.device)
    return {f"{name}_packed": words, f"{name}_scale": scales, f"{name}_shape": shape}


def _for_each_matrix(quantize: Callable[[Tensor], tuple[Tensor, Tensor]], weight: Tensor) -> tuple[Tensor, Tensor]:
    if weight.dim() == 2:
        return quantize(weight)
    values, scales = zip(*map(quantize, weight), strict=True)
    return torch.stack(values), torch.stack(scales)


class QuantizedWeight:
    """One quantised weight of an engine: live tensors that a weight sync writes into."""

    def __init__(self, name: str, weight_OI: Tensor, precision: str) -> None:
        """`weight_OI` is quantised, and not kept."""
        self.shape, self._dtype, self._precision = weight_OI.shape, weight_OI.dtype, precision
        self.tensors = encode_weight(name, weight_OI, precision)

    @property
    def version(self) -> tuple[int, ...]:
        """Changes with every write to a tensor."""
        return tuple(tensor._version for tensor in self.tensors.values())

    def dense(self) -> Tensor:
        """The weight [O, I], or stacked experts [E, I, O], in the dtype that it had."""
        values, scales, *_ = self.tensors.values()
        dequantize = dequantize_fp8 if self._precision == "fp8" else dequantize_int4
        if len(self.shape) == 2:
            return dequantize(values, scales, dtype=self._dtype)
        experts = [dequantize(v, s, dtype=self._dtype) for v, s in zip(values, scales, strict=True)]
        return torch.stack(experts if self._precision == "fp8" else [expert.T for expert in experts])


class KeptWeight:
    """A weight of an engine that is not quantised, where a product has others that are."""

    def __init__(self, name: str, weight_OI: Tensor) -> None:
        self.shape, self.tensors = weight_OI.shape, {name: weight_OI}

    @property
    def version(self) -> tuple[int, ...]:
        """See `QuantizedWeight`."""
        return tuple(tensor._version for tensor in self.tensors.values())

    def dense(self) -> Tensor:
        """The weight [O, I]."""
        (weight,) = self.tensors.values()
        return weight
