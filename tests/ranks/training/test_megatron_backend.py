"""The Megatron-core backend compared with FSDP2 on gloo ranks: the same steps in every parallel layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlscale.models.hf_models import load_causal_lm, load_tokenizer
from tests.ranks.training.launch import report, run_ranks
from tests.ranks.training.megatron_ranks import (
    BIAS,
    DISTILLED,
    LATENT_REPLAYS,
    MODES,
    MORE_RESHARDED,
    MORE_ROLES,
    REPLAYS,
    RESHARDED,
    ROLES,
    SAMPLES,
)
from tests.ranks.training.megatron_ranks import RESUMED as SAVED
from tests.unit.training.rollouts import tiny_latent, tiny_model, tiny_moe

PROGRAM = "tests.ranks.training.megatron_ranks"
SHORT = [name for name, mode in MODES.items() if not mode.is_slow]
RESUMED = [name for name in SAVED if not MODES[name].is_slow]
LONG = [name for name, mode in MODES.items() if mode.is_slow]


@pytest.fixture(scope="module")
def models(cache: Path) -> list[str]:
    """A dense model of four layers, one with experts, one like the first, one of six layers, and a latent one."""
    first, second = tiny_model(cache, num_layers=4), tiny_model(cache, seed=1, num_layers=4)
    deeper = _with_more_tokens(tiny_model(cache, num_layers=6), cache / "more tokens")
    return [first, tiny_moe(cache), second, deeper, tiny_latent(cache)]


def _with_more_tokens(path: str, folder: Path) -> str:
    """The same model with 21 more tokens, so that tensor-parallel ranks divide its vocabulary in another place."""
    model = load_causal_lm(path, dtype=torch.float32)
    model.resize_token_embeddings(model.config.vocab_size + 21, mean_resizing=False)
    model.save_pretrained(folder)
    load_tokenizer(path).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports and checkpoints of two ranks, which run once for all tests of this module."""
    folder = tmp_path_factory.mktemp("two")
    run_ranks(PROGRAM, *models, str(folder), "2", timeout_s=400)
    return folder


@pytest.fixture(scope="module")
def slow_folders(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same for slow modes, on two ranks and on four."""
    folders = {number: tmp_path_factory.mktemp("slow") for number in (2, 4)}
    for number, folder in folders.items():
        run_ranks(PROGRAM, *models, str(folder), f"{number} slow", num_ranks=number, timeout_s=400)
    return folders


def assert_equal(mode: str, found: dict[str, Any]) -> None:
    # The expected metrics are those of packed samples, which have no padding.
    assert found["other names"] == ["rollout/padding"] * MODES[mode].is_padded
    numbers, weights = found["numbers"], found["weights"]
    assert {"loss", "grad_norm", "kl_loss", "entropy", "logprob_diff/mean"} <= set(numbers)
    assert max(numbers.values()) < 1e-5, numbers
    assert max(weights.values()) < 1e-5, weights


@pytest.mark.parametrize("mode", SHORT)
def test_three_steps_equal_those_of_fsdp(folder: Path, mode: str) -> None:
    assert_equal(mode, report(folder, 0)["modes"][mode])


def test_activations_of_some_micro_batches_are_kept(folder: Path) -> None:
    for rank in range(2):
        plain, partial, whole = report(folder, rank)["layer passes"]
        num_micros = whole - plain  # each is recomputed once
        assert num_micros == len(SAMPLES)
        # Of two in flight on the first stage the second is recomputed; the last stage has one in flight.
        assert partial - plain == (num_micros // 2 if rank == 0 else 0)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", LONG)
def test_three_steps_in_slow_layouts_equal_those_of_fsdp(slow_folders: dict[int, Path], mode: str) -> None:
    found = report(slow_folders[MODES[mode].num_ranks], 0)
    assert_equal(mode, found["modes"][mode])
    assert all(found["resumed"].get(mode, {}).values())


@pytest.mark.parametrize("mode", ROLES)
def test_all_roles_equal_those_of_fsdp(folder: Path, mode: str) -> None:
    assert_roles(report(folder, 0)["roles"][mode])


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MORE_ROLES)
def test_all_roles_in_slow_layouts_equal_those_of_fsdp(slow_folders: dict[int, Path], mode: str) -> None:
    assert_roles(report(slow_folders[MODES[mode].num_ranks], 0)["roles"][mode])


def assert_roles(found: dict[str, Any]) -> None:
    numbers, weights = found["difference"]["numbers"], found["difference"]["weights"]
    assert {"loss", "critic_loss", "rollout/kl", "rollout/teacher_kl", "rollout/return"} <= set(numbers)
    assert found["difference"]["other names"] == []
    assert max(numbers.values()) < 1e-5 and max(weights.values()) < 1e-5, found["difference"]
    assert found["resumed exactly"] and found["bytes when offloaded"] == 0
    assert found.get("dedicated critic", 0.0) < 1e-5 and found.get("teacher", 0.0) < 1e-5, found


@pytest.mark.parametrize("mode", list(DISTILLED))
def test_the_divergence_from_a_teacher_equals_that_of_fsdp(folder: Path, mode: str) -> None:
    assert report(folder, 0)["distilled"][mode] < 1e-5


def test_all_ranks_report_the_same(folder: Path) -> None:
    own = {"layer passes"}  # of the layers of a stage
    first, second = ({k: v for k, v in report(folder, rank).items() if k not in own} for rank in range(2))
    assert first == second


@pytest.mark.parametrize("mode", RESUMED)
def test_loading_on_the_same_ranks_continues_bit_for_bit(folder: Path, mode: str) -> None:
    assert report(folder, 0)["resumed"][mode] == {"numbers": True, "weights": True}


def test_scoring_passes_equal_those_of_fsdp(folder: Path) -> None:
    found = report(folder, 0)["passes"]
    assert {"rollout/kl", "rollout/entropy", "mis_weight"} <= set(found["numbers"])
    assert found["other names"] == [] and max(found["numbers"].values()) < 1e-5, found
    assert max(found["weights"].values()) < 1e-5, found["weights"]


def test_a_reference_is_loaded_from_a_checkpoint(folder: Path) -> None:
    # Compared with the initial weights it is 0.07.
    assert report(folder, 0)["kl to itself"] == 0


def test_one_rank_continues_from_a_checkpoint_of_two(folder: Path, models: list[str]) -> None:
    run_ranks(PROGRAM, *models, str(folder), "1", num_ranks=1)
    found = report(folder / "alone", 0)["alone"]
    assert set(found) == set(RESUMED) and max(found.values()) < 1e-5, found


@pytest.mark.parametrize("mode", REPLAYS[2, False])
def test_tokens_use_the_experts_of_the_old_logprobs(folder: Path, mode: str) -> None:
    assert_replayed(report(folder, 0)["replays"], mode)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [2, 4])
def test_routes_are_replayed_in_slow_layouts(slow_folders: dict[int, Path], number: int) -> None:
    for mode in REPLAYS[number, True]:
        assert_replayed(report(slow_folders[number], 0)["replays"], mode)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", LATENT_REPLAYS)
def test_tokens_use_the_experts_that_scores_and_bias_chose(slow_folders: dict[int, Path], mode: str) -> None:
    assert_replayed(report(slow_folders[2], 0)["latent replays"], mode)


def test_the_bias_of_a_router_changes_with_an_update_rate(folder: Path) -> None:
    found = report(folder, 0)
    # Without a rate it equals bitwise that of FSDP2, where nothing writes to it.
    assert [found["modes"][mode]["weights"][BIAS] for mode in SHORT if MODES[mode].is_latent] == [0.0] * 2
    moved = set(found["moved bias"])
    assert moved <= {-0.25, 0.0, 0.25} and {-0.25, 0.25} <= moved


def assert_replayed(found: dict[str, Any], mode: str) -> None:
    assert found["moved"] > 0 and found["differs"] > 1e-4
    assert max(found.get("with lr 0", {"loss": 0.0}).values()) == 0
    assert max(found[mode]["numbers"].values()) < 1e-5 and max(found[mode]["weights"].values()) < 1e-5, found[mode]


@pytest.mark.parametrize("mode", RESHARDED)
def test_another_layout_continues_from_a_checkpoint(folder: Path, mode: str) -> None:
    assert report(folder, 0)["resharded"][mode] < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MORE_RESHARDED)
def test_experts_are_resharded(slow_folders: dict[int, Path], mode: str) -> None:
    assert report(slow_folders[2], 0)["resharded"][mode] < 1e-5


@pytest.mark.parametrize("mode", [mode for mode in RESUMED if not MODES[mode].has_experts])
def test_an_exported_folder_loads_with_transformers(folder: Path, mode: str) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder / mode / "hf")
    final = load_file(folder / mode / "final.safetensors")
    assert all(torch.equal(weight, final[name]) for name, weight in loaded.named_parameters())


def test_every_rank_names_the_rank_with_the_bad_loss(folder: Path) -> None:
    # The last stage computes the loss.
    for rank in range(2):
        assert report(folder, rank)["nan"].startswith("actor rank 1: the loss of optimiser step 0 must be finite")
