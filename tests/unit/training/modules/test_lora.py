"""Low-rank adapters: trained alone, merged for engines, and saved in peft's format."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rlscale.config import ComputeDtype, LoraConfig, LoraSync, ModelBuild, ModelConfig, OffloadMode
from rlscale.errors import ConfigError
from rlscale.models.resolve_model import resolve_model
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.modules.lora import add_adapters, base_name, find_adapters, merge_adapter
from rlscale.training.spec import OffloadSpec
from tests.ranks.training.optimizer_ranks import BATCHES, CASES, ONE_RANK, case_spec, run
from tests.unit.training.rollouts import plan, spec, tiny_latent, tiny_model, tiny_moe

pytestmark = pytest.mark.usefixtures("world")
LORA = CASES["lora"]["lora"]


def trained(model_path: str, **changes: Any) -> FsdpBackend:
    return FsdpBackend(case_spec("lora", model_path, **changes), rank=0, world_size=1)


def weights(trainer: FsdpBackend) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.weights()}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(3, 13)[None]).logits
    return found


@pytest.fixture(scope="module")
def alone(world: None, model_path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], FsdpBackend]:
    return run("lora", model_path, rank=0, world_size=1, folder=tmp_path_factory.mktemp("alone"))


def test_new_adapters_have_no_effect_and_training_changes_their_layers(model_path: str) -> None:
    trainer, plain = trained(model_path), FsdpBackend(spec(model_path), rank=0, world_size=1)
    before = weights(trainer)
    assert before.keys() == weights(plain).keys()
    assert all(torch.equal(weight, before[name]) for name, weight in plain.weights())
    first = trainer.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)]).steps[0]
    assert first["loss"] == pytest.approx(plain.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)]).steps[0]["loss"])
    changed = {name for name, weight in weights(trainer).items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if "proj" in name}


def test_only_target_modules_get_adapters(model_path: str) -> None:
    trainer = trained(model_path, lora=LoraConfig(rank=2, target_modules=["q_proj", "down_proj"]))
    before = weights(trainer)
    trainer.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)])
    changes = {name: weight - before[name] for name, weight in weights(trainer).items()}
    changed = {name for name, change in changes.items() if change.any()}
    assert changed == {name for name in before if "q_proj" in name or "down_proj" in name}
    assert all(torch.linalg.matrix_rank(changes[name], rtol=1e-4) <= 2 for name in changed)


@pytest.mark.parametrize("name", ["qproj", "embed_tokens"])
def test_no_target_is_ignored(name: str, model_path: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"must name linear layers of the model, got \['{name}'\]; it has down_proj, "
    ):
        trained(model_path, lora=LoraConfig(rank=2, target_modules=["q_proj", name]))


def test_published_and_exported_weights_are_the_trained_ones(alone: Any, model_path: str, tmp_path: Path) -> None:
    _, trainer = alone
    trainer.export_hf(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(weight, dict(merged.named_parameters())[name]) for name, weight in trainer.weights())
    base = AutoModelForCausalLM.from_pretrained(model_path)
    before = logits(base)
    with_adapter = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(with_adapter), logits(merged), atol=1e-5, rtol=1e-5)
    assert (before - logits(merged)).abs().max() > 1e-3


def test_engines_can_get_the_adapters_alone(model_path: str, tmp_path: Path) -> None:
    trainer, whole = trained(model_path), trained(model_path, lora=replace(LORA, sync=LoraSync.merged))
    trainer.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)])
    trainer.export_hf(tmp_path)
    assert trainer.adapters is not None and whole.adapters is None
    sent, saved = dict(trainer.adapters.weights()), load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sent.keys() == saved.keys() and all(torch.equal(sent[name], saved[name]) for name in saved)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["lora_alpha"] == LORA.alpha > 0, "alpha 0 would disable the adapter for whoever loads it"
    assert {key: trainer.adapters.config[key] for key in ("r", "lora_alpha")} == {"r": 4, "lora_alpha": LORA.alpha}
    assert set(trainer.adapters.config["target_modules"]) == set(config["target_modules"])
    # The base and the adapters are the merged weights, with alpha / rank applied once.
    plain = FsdpBackend(spec(model_path), rank=0, world_size=1)
    base, merged = dict(trainer.adapters.base_weights()), weights(trainer)
    assert all(torch.equal(weight, base[name]) for name, weight in plain.weights())
    for name, weight in base.items():
        layer = "base_model.model." + name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in sent:
            change = sent[f"{layer}.lora_B.weight"] @ sent[f"{layer}.lora_A.weight"]
            weight = weight + LORA.alpha / 4 * change
        torch.testing.assert_close(merged[name], weight, msg=name)


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.slow
def test_the_reference_is_the_policy_with_adapters_off(model_path: str, offloads: bool) -> None:
    offload = OffloadSpec(mode=OffloadMode.move) if offloads else None
    kl = {"use_kl_loss": True, "kl_loss_type": "k2"}
    trainer = trained(model_path, algo=kl, ref_path=model_path, offload=offload)
    second = FsdpBackend(spec(model_path, algo=kl, ref_path=model_path), rank=0, world_size=1)
    for batch in BATCHES:
        trainer.train(batch, [plan(batch, ONE_RANK)])
    assert trainer.reference is not None and second.reference is not None
    assert trainer.reference.model is trainer.policy.model, "no second model"
    columns = [each.prepare(BATCHES[0], [plan(BATCHES[0], ONE_RANK)])[1] for each in (trainer, second)]
    assert columns[0].ref_logprobs is not None and columns[1].ref_logprobs is not None
    torch.testing.assert_close(columns[0].ref_logprobs, columns[1].ref_logprobs, atol=2e-6, rtol=0)
    # The adapters are on again: the policy has moved away from its base, and still learns.
    result = trainer.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)]).steps[0]
    assert result["kl_loss"] > 1e-4 and result["grad_norm"] > 0


def test_another_model_stays_a_reference_with_weights(model_path: str, cache: Path) -> None:
    kl = {"use_kl_loss": True}
    trainer = trained(model_path, algo=kl, ref_path=tiny_model(cache, seed=1))
    assert trainer.reference is not None and trainer.reference.model is not trainer.policy.model


def test_training_can_start_from_saved_adapters(alone: Any, model_path: str, tmp_path: Path) -> None:
    _, trainer = alone
    trainer.export_hf(tmp_path)
    lora = LoraConfig(rank=4, alpha=8, load=str(tmp_path / "adapter"))
    begun = trained(model_path, lora=lora)
    assert all(torch.equal(weight, weights(trainer)[name]) for name, weight in begun.weights())
    message = "train.lora.load must contain adapters of this model and rank, got"
    with pytest.raises(ConfigError, match=re.escape(message) + r".*: \(4, 48\) in the folder, \(2, 48\) in the model"):
        trained(model_path, lora=LoraConfig(rank=2, load=str(tmp_path / "adapter")))
    message = "train.lora.alpha must be the lora_alpha=8 of the adapters in train.lora.load, got 32; set it to 8"
    with pytest.raises(ConfigError, match=re.escape(message)):
        trained(model_path, lora=LoraConfig(rank=4, load=str(tmp_path / "adapter")))
    with pytest.raises(ConfigError, match=r"train\.lora\.load must be a folder of adapters in peft's format, got /no"):
        trained(model_path, lora=LoraConfig(rank=2, load="/no/such"))


def test_unknown_target_modules_raise(model_path: str) -> None:
    message = (
        "train.lora.target_modules must name linear layers of the model, got ['query']; it has down_proj, gate_proj"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        trained(model_path, lora=LoraConfig(rank=2, target_modules=["query"]))


@pytest.mark.parametrize("make", [tiny_latent, tiny_moe])
@pytest.mark.slow
def test_adapters_next_to_experts_are_all_published(make: Callable[[Path], str], cache: Path, tmp_path: Path) -> None:
    trainer = trained(make(cache))
    before = weights(trainer)
    for batch in BATCHES:
        trainer.train(batch, [plan(batch, ONE_RANK)])
    published = weights(trainer)
    changed = {name for name, weight in published.items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if "self_attn" in name and "norm" not in name}
    adapters = [parameter for parameter in trainer.policy.model.parameters() if parameter.requires_grad]
    assert len(adapters) == 2 * len(changed), "every adapter is in a published weight"
    trainer.export_hf(tmp_path)
    merged = FsdpBackend(spec(str(tmp_path)), rank=0, world_size=1)
    steps = [each.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)]).steps[0] for each in (trainer, merged)]
    assert steps[0]["entropy"] == pytest.approx(steps[1]["entropy"], rel=1e-5)
    base = AutoModelForCausalLM.from_pretrained(make(cache))
    with_adapter, whole = (
        PeftModel.from_pretrained(base, tmp_path / "adapter"),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    )
    torch.testing.assert_close(logits(with_adapter), logits(whole), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("targets", [["gate_proj", "up_proj", "down_proj"], ["q_a_proj", "down_proj"], ["gate"]])
def test_experts_cannot_have_adapters(targets: list[str], cache: Path) -> None:
    message = (
        f"train.lora.target_modules must name layers of attention only in a model with experts, got {targets}; "
        "adapters of experts cannot be merged for engines and exports; choose from [kv_a_proj_with_mqa,kv_b_proj,"
        "o_proj,q_a_proj,q_b_proj]"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        trained(tiny_latent(cache), lora=LoraConfig(rank=2, target_modules=targets))


@pytest.mark.parametrize("dtype", list(ComputeDtype))
@pytest.mark.slow
def test_trainer_and_engine_have_the_same_model(model_path: str, dtype: ComputeDtype, tmp_path: Path) -> None:
    trainer = trained(model_path, dtype=dtype, gradient_checkpointing=True, lora=LORA)
    for batch in BATCHES:
        trainer.train(batch, [plan(batch, ONE_RANK)])
    trainer.export_hf(tmp_path)
    merged = FsdpBackend(spec(str(tmp_path), dtype=dtype), rank=0, world_size=1)
    steps = [each.train(BATCHES[0], [plan(BATCHES[0], ONE_RANK)]).steps[0] for each in (trainer, merged)]
    assert steps[0]["entropy"] == pytest.approx(steps[1]["entropy"], rel=1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("build", ["tiny_qwen2_5_vl", "tiny_qwen3_vl"])
@pytest.mark.slow
def test_a_vision_tower_gets_adapters_that_can_be_merged(build: ModelBuild, tmp_path: Path) -> None:
    folder = resolve_model(ModelConfig(build=build, cache_dir=str(tmp_path)))
    model = AutoModelForImageTextToText.from_pretrained(folder)
    whole = {name: parameter.shape for name, parameter in model.named_parameters()}
    add_adapters(model, LoraConfig(rank=2), seed=0)
    adapters, base = find_adapters(model), {base_name(name): each for name, each in model.named_parameters()}
    assert sum(".visual." in name for name in adapters) > 4 < sum(".layers." in name for name in adapters)
    for name, adapter in adapters.items():
        merged = merge_adapter(base[name], adapter, dtype=torch.float32)
        assert merged.shape == whole[name], name
    # The convolution over patches has the name of a linear layer.
    with pytest.raises(ConfigError, match=r"must name linear layers of the model, got \['proj'\]; it has down_proj, "):
        add_adapters(
            AutoModelForImageTextToText.from_pretrained(folder), LoraConfig(rank=2, target_modules=["proj"]), seed=0
        )
