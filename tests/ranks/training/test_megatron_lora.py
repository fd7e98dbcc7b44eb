"""Low-rank adapters on Megatron-core, compared with those on FSDP2 on two gloo ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.ranks.training.launch import report, run_ranks
from tests.ranks.training.megatron_families import CONFIGS, DELTAS, NEWER, write_families
from tests.ranks.training.megatron_lora_ranks import CASES, DENSE, FUSED
from tests.unit.training.rollouts import tiny_latent, tiny_model, tiny_moe

PROGRAM = "tests.ranks.training.megatron_lora_ranks"
SHORT = [name for name, case in CASES.items() if not case.is_slow]
SHORT_DENSE = [name for name in SHORT if CASES[name].model == DENSE]
LONG = [name for name, case in CASES.items() if case.is_slow]


@pytest.fixture(scope="module")
def models(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    dense, root = tiny_model(cache), tmp_path_factory.mktemp("families")
    further = {"gpt_oss": NEWER["gpt_oss"], "qwen3_next": DELTAS["qwen3_next"], "qwen3_5_text": DELTAS["qwen3_5"]}
    write_families(root, {"glm4": CONFIGS["glm4"], **further})
    for name in ("glm4", *further):
        for file in Path(dense).glob("*token*"):
            shutil.copy(file, root / name)
    own = [dense, tiny_moe(cache), tiny_latent(cache), str(root / "glm4"), tiny_model(cache, seed=1)]
    return [*own, *(str(root / name) for name in further)]


@pytest.fixture(scope="module")
def short(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports, checkpoints and exports of two ranks, which run once for all short tests."""
    folder = tmp_path_factory.mktemp("short")
    run_ranks(PROGRAM, *models, str(folder), "short", timeout_s=300)
    return folder


@pytest.fixture(scope="module")
def slow(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    run_ranks(PROGRAM, *models, str(folder), "slow", timeout_s=400)
    return folder


def assert_equal(found: dict[str, Any]) -> None:
    numbers, weights = found["difference"]["numbers"], found["difference"]["weights"]
    assert found["start"] == 0, "both backends draw the same adapters"
    assert {"loss", "grad_norm", "kl_loss", "entropy"} <= set(numbers) and found["difference"]["other names"] == []
    numbers.pop("rollout/padding", None)  # of rows: it depends on the number of data-parallel ranks
    assert max(numbers.values()) < 1e-5, numbers
    assert max(weights.values()) < 1e-5 and found["adapters"] < 1e-5, weights
    assert found["base"] and found["resumed"] and found["exported"] == 0
    assert found["changed"] and all("_proj" in name for name in found["changed"])
    assert found.get("resharded", 0.0) < 1e-5


@pytest.mark.parametrize("case", SHORT)
def test_steps_with_adapters_equal_those_of_fsdp(short: Path, case: str) -> None:
    assert_equal(report(short, 0)[case])
    assert report(short, 0)[case]["difference"] == report(short, 1)[case]["difference"]


@pytest.mark.nightly
@pytest.mark.parametrize("case", LONG)
def test_steps_in_further_layouts_equal_those_of_fsdp(slow: Path, case: str) -> None:
    assert_equal(report(slow, 0)[case])


def test_only_adapters_are_trained(short: Path) -> None:
    for case in SHORT_DENSE:
        found = report(short, 0)[case]
        # A and B of seven layers, in each decoder layer of the rank.
        assert found["trained"] == 2 * 7 * (1 if case == "pp2" else 2) and found["state"] == found["trained"], found


@pytest.mark.parametrize("case", SHORT_DENSE)
def test_exported_adapters_are_those_of_fsdp_and_peft_loads_them(short: Path, models: list[str], case: str) -> None:
    ours, theirs = (short / case / folder for folder in ("hf", "fsdp"))
    configs = [json.loads((each / "adapter" / "adapter_config.json").read_text()) for each in (ours, theirs)]
    for config in configs:
        config["target_modules"].sort()  # peft keeps a set
    assert configs[0] == configs[1] and configs[0]["lora_alpha"] == 8
    found, expected = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (ours, theirs))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=name)
    merged, base = (AutoModelForCausalLM.from_pretrained(path) for path in (ours, models[DENSE]))
    tokens = torch.arange(3, 13)[None]
    with torch.no_grad():
        before = base(tokens).logits
        with_adapter = PeftModel.from_pretrained(base, ours / "adapter")(tokens).logits
        torch.testing.assert_close(with_adapter, merged(tokens).logits, atol=1e-5, rtol=1e-5)
    assert (with_adapter - before).abs().max() > 1e-3


def test_a_checkpoint_is_converted_with_its_adapters(short: Path) -> None:
    found = report(short, 0)["pp2"]
    assert found["converted"] == 0
    message = f"{short / 'pp2'} must contain weights without adapters, got a checkpoint of train.lora; convert it with"
    assert found["without adapters"].startswith(message)


@pytest.mark.nightly
def test_adapters_of_a_fused_layer_are_those_of_its_tensor(slow: Path) -> None:
    adapters = load_file(
        slow / next(n for n in LONG if CASES[n].model == FUSED) / "hf/adapter/adapter_model.safetensors"
    )
    assert adapters["base_model.model.model.layers.0.mlp.gate_up_proj.lora_B.weight"].shape == (2 * 48, 4)
