"""Output layer that returns logprobs instead of logits, for large vocabularies.

Shape legend: R trainable tokens of a micro-batch, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlscale.algo.linear_distillation import TeacherRequest, logprobs_and_teacher_kl
from rlscale.algo.linear_logprobs import HeadOptions, logprobs_from_hidden
from rlscale.architectures.family import find_family
from rlscale.errors import ConfigError, Problem
from rlscale.training.cpu.onednn_linear import OneDnnLinear, product

MIN_VOCABULARY = 4096
"""Smaller vocabularies have small logits, for which plain products are faster."""

TILE_ELEMENTS = {"cpu": 2**22, "cuda": 2**25}
"""Logits that exist at a time: 16 MB in float32 mostly stay in the cache of a CPU; on a GPU enough to occupy it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobRequest:
    """Targets and options of the logprobs that are computed instead of logits."""

    targets: Tensor  # [R]
    temperature: float
    entropy_grad: bool
    teacher: TeacherRequest | None = None  # None: no divergence is computed


class LogprobHead(OneDnnLinear):
    """Output layer. Inside `requesting` it returns logprobs and entropies [1, R, 2], float32, else logits [1, R, V].

    With a teacher in the request, the divergence from it is a third column.

    The layer itself computes them because only in its forward pass are the weights of a sharded model gathered.
    """

    request: LogprobRequest | None = None
    chunk_tokens: int | None = None  # None: by TILE_ELEMENTS

    def forward(self, input: Tensor) -> Tensor:
        request = self.request
        if request is None:
            return super().forward(input)
        vocab_size, _ = self.weight.shape
        options = HeadOptions(
            chunk_tokens=tile_tokens(self, device=input.device),
            temperature=request.temperature,
            entropy_grad=request.entropy_grad,
            product=product,
        )
        hidden, targets = input.squeeze(0), request.targets
        columns: tuple[Tensor, ...]
        if request.teacher is None:
            columns = logprobs_from_hidden(hidden, self.weight, targets_T=targets, options=options)
        else:
            teacher = request.teacher.on_vocabulary(vocab_size)
            columns = logprobs_and_teacher_kl(hidden, self.weight, targets_T=targets, request=teacher, options=options)
        # A new tensor, not a view: FSDP warns about views of its outputs.
        return torch.stack([each.unsqueeze(0) for each in columns], dim=-1)

    @contextmanager
    def requesting(self, request: LogprobRequest) -> Iterator[None]:
        """Makes the layer return logprobs and entropies instead of logits."""
        self.request = request
        try:
            yield
        finally:
            self.request = None


def tile_tokens(head: nn.Linear, *, device: torch.device) -> int:
    """Tokens whose logits exist at a time: those of a LogprobHead, or as many as fit `TILE_ELEMENTS`."""
    given = head.chunk_tokens if isinstance(head, LogprobHead) else None
    return given or max(1, TILE_ELEMENTS[device.type] // head.weight.shape[0])


@contextmanager
def select_rows(layer: nn.Module, rows: Tensor) -> Iterator[None]:
    """Restricts an output layer to some rows of its input: [1, R, H] of [S, L, H]; `rows` are indices into S * L."""
    hook = layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].flatten(0, 1)[rows].unsqueeze(0),))
    try:
        yield
    finally:
        hook.remove()


def replace_with_logprob_head(model: PreTrainedModel, *, chunk_tokens: int = -1) -> bool:
    """Turns the output layer of a model into a LogprobHead, in place; returns whether it did.

    Args:
        model: not sharded yet.
        chunk_tokens: tokens whose logits exist at a time. 0 or less: a small vocabulary keeps its layer, and a large
            one gets a number that fits `TILE_ELEMENTS`.

    Raises:
        ConfigError: `chunk_tokens` is set, and the logits of this model cannot be computed in chunks.
    """
    head, is_set = output_layer(model), chunk_tokens > 0
    if not has_product_logits(model):
        if is_set:
            rule = f"be -1 with a model of the type {model.config.model_type}"
            fix = "its logits are changed after the output layer; lower batch.max_tokens_per_gpu instead"
            problem = Problem(path="train.log_probs_chunk_size", rule=rule, value=str(chunk_tokens), fix=fix)
            raise ConfigError([problem])
        return False
    assert isinstance(head, nn.Linear)
    if head.weight.shape[0] < MIN_VOCABULARY and not is_set:
        return False
    # In place: the weight may be tied to the embedding, and keeps its name.
    head.__class__ = LogprobHead
    head.chunk_tokens = chunk_tokens if is_set else None  # type: ignore[assignment]  # now a LogprobHead
    return True


def has_product_logits(model: PreTrainedModel) -> bool:
    """Whether the logits are the product of hidden states and the weight of the output layer, and nothing else."""
    head = output_layer(model)
    plain = isinstance(head, nn.Linear) and getattr(head, "bias", None) is None
    return plain and find_family(model.config.model_type).chunked_logits


def output_layer(model: PreTrainedModel) -> nn.Module | None:
    """Layer that computes logits from hidden states."""
    layer: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return layer
