"""Fused layers compared with those of transformers."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlscale.config import LoraConfig
from rlscale.models.hf_models import load_causal_lm
from rlscale.training.attention.packed import PACKED_ATTENTION
from rlscale.training.cpu.fused_layers import use_fused_layers
from rlscale.training.cpu.onednn_linear import use_onednn
from rlscale.training.fsdp.model import decoder_layers
from rlscale.training.fsdp.step import compute_logits
from rlscale.training.modules.lora import add_adapters
from rlscale.training.packing.microbatch import Microbatch, pack
from tests.unit.training.rollouts import RAGGED, make_batch, tiny_model, with_equal_prompts

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("models"))


def loaded(folder: str, *, is_fused: bool) -> PreTrainedModel:
    model = load_causal_lm(folder, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    with torch.no_grad():  # the initial norm weights of 1 would hide errors
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))
    use_onednn(model)
    if is_fused:
        assert use_fused_layers(model, decoder_layers(model)) == 2
    return model


def value_and_gradients(model: PreTrainedModel, micro: Microbatch) -> tuple[Tensor, dict[str, Tensor | None]]:
    logits = compute_logits(model, micro)
    weights = torch.arange(logits.numel(), dtype=torch.float32).sin().view_as(logits)
    (logits * weights).sum().backward()  # type: ignore[no-untyped-call]
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("frozen", ["nothing", "proj", "norm"])
@pytest.mark.parametrize("shares_prompts", [False, True])
def test_value_and_gradients_are_those_of_transformers(folder: str, shares_prompts: bool, frozen: str) -> None:
    batch = with_equal_prompts() if shares_prompts else make_batch(RAGGED)
    micro = pack(batch, range(batch.num_samples), device=CPU, share_prompts=shares_prompts)
    results = []
    for is_fused in (False, True):
        model = loaded(folder, is_fused=is_fused)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        results.append(value_and_gradients(model, micro))
    (plain, plain_gradients), (fused, gradients) = results
    torch.testing.assert_close(fused, plain, atol=2e-5, rtol=1e-5)
    assert gradients.keys() == plain_gradients.keys()
    for name, gradient in gradients.items():
        wanted = plain_gradients[name]
        assert (gradient is None) == (wanted is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-4, msg=name)


def test_a_second_pass_is_bitwise_equal(folder: str) -> None:
    batch = with_equal_prompts()
    micro = pack(batch, range(batch.num_samples), device=CPU, share_prompts=True)
    (first, gradients), (second, again) = (value_and_gradients(loaded(folder, is_fused=True), micro) for _ in range(2))
    assert torch.equal(first, second)
    for name, gradient in gradients.items():
        torch.testing.assert_close(again[name], gradient, atol=0.0, rtol=0.0)


def test_other_layers_are_not_fused(folder: str) -> None:
    model = load_causal_lm(folder, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    assert use_fused_layers(model, decoder_layers(model)) == 0  # not through oneDNN
    adapted = load_causal_lm(folder, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    add_adapters(adapted, LoraConfig(rank=2), seed=0)
    use_onednn(adapted)
    assert use_fused_layers(adapted, decoder_layers(adapted)) == 0
    eager = load_causal_lm(folder, dtype=torch.float32, attn_implementation="eager")
    use_onednn(eager)
    assert use_fused_layers(eager, decoder_layers(eager)) == 0
