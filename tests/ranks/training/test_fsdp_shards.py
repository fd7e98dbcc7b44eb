"""Three ranks on FSDP2 that read only their rows, and export and send weights together."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlscale.training.spec import WeightOwners
from tests.ranks.training.fsdp_shard_ranks import NUM_RANKS, PUSHED, SMALL_BUCKET
from tests.ranks.training.launch import report, run_ranks
from tests.ranks.weights.conftest import engine_processes
from tests.unit.training.rollouts import tiny_latent, tiny_model, tiny_moe

MODELS = ("tied", "untied", "experts", "latent")


@pytest.fixture(scope="module")
def reports(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Reports of the ranks, which run once for all tests of this module."""
    models = {
        "tied": tiny_model(cache),
        "untied": tiny_model(cache, tied=False),
        "experts": tiny_moe(cache),
        "latent": tiny_latent(cache),
    }
    folder = tmp_path_factory.mktemp("reports")
    with engine_processes() as start:
        words = (json.dumps(models), str(folder), json.dumps([start(fault="").url for _ in range(2)]))
        run_ranks("tests.ranks.training.fsdp_shard_ranks", *words, num_ranks=NUM_RANKS, timeout_s=200)
    return [report(folder, rank) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("name", MODELS)
def test_every_rank_holds_the_rows_that_transformers_would_load(name: str, reports: list[dict[str, Any]]) -> None:
    assert all(found[name]["loaded"] for found in reports)
    assert bool(reports[0][name]["buffers"]) == (name == "latent")  # the bias of the router


@pytest.mark.parametrize("to", list(WeightOwners))
@pytest.mark.parametrize("name", MODELS)
def test_full_weights_are_those_of_the_files(name: str, to: WeightOwners, reports: list[dict[str, Any]]) -> None:
    found = [each[name]["exported"][to] for each in reports]
    names, wanted = found[0]["names"], sorted(found[0]["wanted"])
    assert all(each["same"] for each in found)
    if to == WeightOwners.every:
        assert all(sorted(own) == wanted for own in names)
        return
    assert sorted(name for own in names for name in own) == wanted
    spread = to != WeightOwners.first
    assert found[0]["senders"] == (list(range(NUM_RANKS)) if spread else [0])
    assert [bool(own) for own in names] == [True, spread, spread]
    whole = sum(each["bytes"] for each in found)
    for each in found:
        # A rank gets a bucket, or one larger tensor, and sends the same amount.
        largest = max(SMALL_BUCKET, *(other["most"] for other in found), 0)
        assert each["peak"] <= 2.2 * largest or name in ("experts", "latent")
        assert each["bytes"] <= (whole / NUM_RANKS + largest if spread else whole) or name in ("experts", "latent")


@pytest.mark.parametrize("name", MODELS)
def test_all_ranks_write_the_files_of_a_folder(name: str, reports: list[dict[str, Any]]) -> None:
    for found in (each[name]["written"] for each in reports):
        assert found["loads"] and found["same"]
        weights = [file for file in found["files"] if file.endswith(".safetensors")]
        assert len(weights) >= NUM_RANKS and weights[0] == f"model-00001-of-{len(weights):05}.safetensors"
        assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(found["files"])


def test_rank_0_writes_a_small_model_into_one_file(reports: list[dict[str, Any]]) -> None:
    for found in (each["one file"] for each in reports):
        assert found["loads"] and found["same"]
        assert [file for file in found["files"] if ".safetensors" in file] == ["model.safetensors"]


@pytest.mark.parametrize("name", PUSHED)
def test_every_rank_sends_its_share_to_every_engine(name: str, reports: list[dict[str, Any]]) -> None:
    found = [each[name]["pushed"] for each in reports]
    assert all(each["same"] for each in found)  # the bytes of the Hugging Face folder
    assert found[0]["senders"] == list(range(NUM_RANKS))
    whole = found[0]["all_bytes"]
    for each in found:
        first, second = each["reported"]
        assert first == whole and (0 < second < whole / 5 if name == "untied" else second == whole)  # nothing changed
    assert all(each["own_bytes"] for each in found) and sum(each["own_bytes"] for each in found) == whole


def test_every_rank_reports_a_sender_that_fails_and_none_hangs(reports: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(each["failure"] for each in reports):
        others = "WeightSyncError: trainer rank 2 must send its weights, got RuntimeError: no memory left"
        assert found["error"] == ("RuntimeError: no memory left" if rank == 2 else others)
        assert found["afterwards"]["same"]


@pytest.mark.parametrize("part", ["drawn", "merged", "changed"])
def test_adapters_are_those_of_a_whole_model(part: str, reports: list[dict[str, Any]]) -> None:
    assert all(found["adapters"][part] for found in reports)


@pytest.mark.parametrize("part", ["critic", "head", "teacher"])
def test_critic_and_teacher_load_their_own_files(part: str, reports: list[dict[str, Any]]) -> None:
    assert all(found["roles"][part] for found in reports)
