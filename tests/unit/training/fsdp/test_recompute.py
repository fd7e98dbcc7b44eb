"""Recomputation to save memory: bitwise equal, with less kept for the backward pass."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlscale.config import LoraConfig
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.modules.recompute import recompute_activations
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec

pytestmark = pytest.mark.usefixtures("world")

BATCH = make_batch(RAGGED)
ONE_RANK = [[[*range(8)]]]


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for the backward pass; `largest` is the peak."""

    def __init__(self) -> None:
        self.largest = self.now = 0
        super().__init__(lambda tensor: _Held(tensor, self), lambda held: held.tensor)


class _Held:
    def __init__(self, tensor: Tensor, counter: SavedBytes) -> None:
        self.tensor, self._counter = tensor, counter
        self._size = tensor.numel() * tensor.element_size()
        counter.now += self._size
        counter.largest = max(counter.largest, counter.now)

    def __del__(self) -> None:
        self._counter.now -= self._size


def one_step(model_path: str, **fields: Any) -> tuple[dict[str, float], dict[str, Tensor], int]:
    """Metrics, weights afterwards, and the bytes kept for the backward pass."""
    trainer = FsdpBackend(spec(model_path, **fields), rank=0, world_size=1)
    saved = SavedBytes()
    with saved:
        step = trainer.train(BATCH, [plan(BATCH, ONE_RANK)]).steps[0]
    return step, dict(trainer.weights()), saved.largest


@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_recomputing_the_loss_function_keeps_bits_and_saves_memory(model_path: str, entropy_coef: float) -> None:
    algo = {"entropy_coef": entropy_coef}
    plain, weights, kept = one_step(model_path, algo=algo)
    again, others, left = one_step(model_path, algo=algo, recompute_loss_function=True)
    assert plain == again
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
    # Log-probabilities over the 14 tokens of the vocabulary in float32.
    assert kept - left >= int(BATCH.loss_mask.sum()) * 14 * 4


def test_gradient_checkpointing_keeps_bits_and_saves_memory(model_path: str) -> None:
    plain, weights, kept = one_step(model_path)
    again, others, left = one_step(model_path, gradient_checkpointing=True)
    assert plain == again and left < 0.5 * kept
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


@pytest.mark.parametrize("name", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
def test_layers_are_recomputed_without_reentrant_autograd(name: str) -> None:
    """Under the name of every version of transformers: the default of older ones loses gradients of adapters."""
    given: list[object] = []
    model: Any = SimpleNamespace(**{name: given.append})
    recompute_activations(model)
    assert given == [{"use_reentrant": False}]


def test_adapters_get_the_same_gradient_if_layers_are_recomputed(model_path: str) -> None:
    lora = LoraConfig(rank=2)
    step, weights, _ = one_step(model_path, lora=lora)
    again, others, _ = one_step(model_path, lora=lora, gradient_checkpointing=True)
    assert step == again and step["grad_norm"] > 0
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
