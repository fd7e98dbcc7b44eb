"""Output layer of a value model: one number per position instead of logits."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlscale.training.modules.logprob_head import output_layer


class ValueHead(nn.Linear):
    """Hidden states [..., H] to values [..., 1], without a bias.

    The weight starts at 0: before the first step every value is 0 and advantages are plain returns. No random number is
    needed, so all ranks have the same weight.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def use_value_head(model: PreTrainedModel) -> None:
    """Replaces the output layer of a model by a new value head. A tied embedding keeps its weight and is untied."""
    layer = output_layer(model)
    assert isinstance(layer, nn.Linear), f"{type(model).__name__} has no linear output layer"
    model.set_output_embeddings(ValueHead(layer.in_features))  # type: ignore[no-untyped-call]
    model.config.tie_word_embeddings = False


def squeeze_values(output: Tensor) -> Tensor:
    """Output [R, 1] of a value head as float32 values. [R]"""
    return output.squeeze(-1).float()
