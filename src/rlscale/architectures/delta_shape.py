"""The shape of a gated delta net: linear attention whose state is a matrix for each value head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaShape:
    """Heads of a gated delta net and their widths."""

    key_heads: int
    value_heads: int  # several of them share a key head
    key_width: int
    value_width: int
    conv_width: int  # positions that the convolution reads

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> DeltaShape | None:
        """The shape in the result of `hf_fields`. None: the model has no such layers."""
        if "linear_layers" not in fields:
            return None
        names = ("key_heads", "value_heads", "key_width", "value_width", "conv_width")
        return cls(**{name: fields[f"linear_{name}"] for name in names})

    @property
    def parts(self) -> tuple[int, ...]:
        """Rows of the projection of the input: of queries, keys, values, output gates, betas and decays."""
        keys, values = self.key_heads * self.key_width, self.value_heads * self.value_width
        return keys, keys, values, values, self.value_heads, self.value_heads

    @property
    def flops_per_token(self) -> int:
        """Operations of the recurrence: the state is read for the correction, written, and read for the output."""
        return 3 * 2 * self.value_heads * self.key_width * self.value_width

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return sum(self.parts[:3])

    def state_bytes(self, *, dtype_bytes: int) -> int:
        """Bytes that an engine keeps of one sequence in one layer.

        Args:
            dtype_bytes: of the inputs of the convolution. The matrices of the heads are in float32.
        """
        window = (self.conv_width - 1) * self.channels
        return dtype_bytes * window + 4 * self.value_heads * self.key_width * self.value_width

    def named_shapes(self, hidden: int, *, by_head: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names in the module `linear_attn` of transformers, and shapes.

        Args:
            hidden: width of the model.
            by_head: the projections are two tensors, as in Qwen3-Next, instead of four, as in Qwen3.5.
        """
        keys, _, values, gates, betas, decays = self.parts
        convolved = 2 * keys + values
        yield "dt_bias", (self.value_heads,)
        yield "A_log", (self.value_heads,)
        yield "conv1d.weight", (convolved, 1, self.conv_width)
        if by_head:
            yield "in_proj_qkvz.weight", (convolved + gates, hidden)
            yield "in_proj_ba.weight", (betas + decays, hidden)
        else:
            yield "in_proj_qkv.weight", (convolved, hidden)
            for name, rows in (("z", gates), ("b", betas), ("a", decays)):
                yield f"in_proj_{name}.weight", (rows, hidden)
        yield "norm.weight", (self.value_width,)
        yield "out_proj.weight", (hidden, values)
