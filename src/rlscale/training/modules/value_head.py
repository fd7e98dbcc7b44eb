"""The output layer of a value model: one number at each position instead of logits."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlscale.training.modules.logprob_head import output_layer


class ValueHead(nn.Linear):
    """Hidden states [..., H] to values [..., 1], without a bias.

    Starts at 0, so that before the first step every value is 0 and advantages are plain returns; no random number is
    drawn, so every rank makes the same one.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


def use_value_head(model: PreTrainedModel) -> None:
    """Puts a new value head in the place of a model's output layer. A tied embedding stays as it is, untied."""
    layer = output_layer(model)
    assert isinstance(layer, nn.Linear), f"{type(model).__name__} has no linear output layer"
    model.set_output_embeddings(ValueHead(layer.in_features))  # type: ignore[no-untyped-call]
    model.config.tie_word_embeddings = False


def squeeze_values(output: Tensor) -> Tensor:
    """Output [R, 1] of a value head as float32 values. [R]"""
    return output.squeeze(-1).float()
