"""Muon, learning rates by kind and frozen parameters on Megatron-core, compared with FSDP2 on two gloo ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.training.launch import report, run_ranks
from tests.ranks.training.megatron_families import DELTAS, NEWER, write_families
from tests.ranks.training.megatron_optimizer_ranks import CASES
from tests.unit.training.rollouts import tiny_latent, tiny_model, tiny_moe

PROGRAM = "tests.ranks.training.megatron_optimizer_ranks"


@pytest.fixture(scope="module")
def models(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("families")
    further = {"gpt_oss": NEWER["gpt_oss"], "qwen3_next": DELTAS["qwen3_next"]}
    write_families(root, further)
    for file in Path(tiny_model(cache)).glob("*token*"):
        for name in further:
            shutil.copy(file, root / name)
    own = [tiny_model(cache), tiny_moe(cache), tiny_model(cache, tied=False), tiny_latent(cache)]
    return [*own, *(str(root / name) for name in further)]


@pytest.fixture(scope="module")
def short(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports and checkpoints of two ranks, which run once for all short tests."""
    folder = tmp_path_factory.mktemp("short")
    run_ranks(PROGRAM, *models, str(folder), "short", timeout_s=300)
    return folder


@pytest.fixture(scope="module")
def slow(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    run_ranks(PROGRAM, *models, str(folder), "slow", timeout_s=300)
    return folder


def assert_equal(found: dict[str, Any]) -> None:
    numbers, weights = found["difference"]["numbers"], found["difference"]["weights"]
    assert {"loss", "grad_norm", "kl_loss", "entropy"} <= set(numbers) and found["difference"]["other names"] == []
    numbers.pop("rollout/padding", None)  # of rows: it depends on the number of data-parallel ranks
    assert max(numbers.values()) < 1e-5, numbers
    assert max(weights.values()) < 1e-5, weights
    assert found["changed"] and found["resumed"]


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if not case.is_slow])
def test_steps_equal_those_of_fsdp_and_resume_exactly(short: Path, case: str) -> None:
    assert_equal(report(short, 0)["cases"][case])
    assert report(short, 0) == report(short, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.is_slow])
def test_steps_in_further_layouts_equal_those_of_fsdp(slow: Path, case: str) -> None:
    assert_equal(report(slow, 0)["cases"][case])


def test_frozen_parameters_keep_their_bits(short: Path) -> None:
    cases = report(short, 0)["cases"]
    assert cases["last stage only"]["changed"] == ["model.norm.weight"]
    frozen = cases["frozen, recomputed"]["changed"]
    assert not any("embed_tokens" in name or "layers.0." in name for name in frozen)
    assert {"model.layers.1.self_attn.q_proj.weight", "model.norm.weight"} <= set(frozen)
    assert all("experts" in name for name in cases["experts only"]["changed"])


def test_a_resumed_run_may_change_the_rates(short: Path) -> None:
    assert report(short, 0)["changed rate"] == 0


def test_a_part_of_a_parameter_cannot_be_frozen(short: Path) -> None:
    names = ", ".join(f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv")
    message = f"train.freeze_params must match all or none of {names} with train.backend=megatron, got q_proj; "
    assert message in report(short, 0)["part of a parameter"]
