"""An output layer that gives logprobs instead of logits, where the vocabulary is large.

Shape legend: R trainable tokens of a micro-batch, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlscale.algo.head import HeadOptions, head_logprobs
from rlscale.training.linear import OneDnnLinear, product

MODEL_TYPES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
"""Architectures whose logits are what the output layer returns, not scaled or capped afterwards."""

MIN_VOCABULARY = 4096
"""Below it the logits of a micro-batch are small, and the plain way is the faster one."""

CHUNK_ELEMENTS = 2**22
"""Logits that exist at a time: 16 MB in float32, most of which stay in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is to be computed instead of logits."""

    targets: Tensor  # [R]
    temperature: float
    entropy_grad: bool


class LogprobHead(OneDnnLinear):
    """An output layer. Inside `asking` it returns logprobs and entropies [1, R, 2] in float32, else logits [1, R, V].

    The layer itself computes them because only in its forward pass are the weights of a sharded model gathered.
    """

    asked: Asked | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.asked is None:
            return super().forward(input)
        asked, (vocab_size, _) = self.asked, self.weight.shape
        options = HeadOptions(
            chunk_tokens=max(1, CHUNK_ELEMENTS // vocab_size),
            temperature=asked.temperature,
            entropy_grad=asked.entropy_grad,
            product=product,
        )
        both = head_logprobs(input.squeeze(0), self.weight, targets_T=asked.targets, options=options)
        # Not a view: FSDP warns of those.
        return torch.stack([each.unsqueeze(0) for each in both], dim=-1)

    @contextmanager
    def asking(self, asked: Asked) -> Iterator[None]:
        self.asked = asked
        try:
            yield
        finally:
            self.asked = None


def use_logprob_head(model: PreTrainedModel) -> bool:
    """Turns the output layer of a model with a large vocabulary into a LogprobHead, in place; whether it did."""
    head = output_layer(model)
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        return False
    if model.config.model_type not in MODEL_TYPES or head.weight.shape[0] < MIN_VOCABULARY:
        return False
    head.__class__ = LogprobHead
    return True


def output_layer(model: PreTrainedModel) -> nn.Module | None:
    """The layer that makes logits of hidden states."""
    layer: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return layer
