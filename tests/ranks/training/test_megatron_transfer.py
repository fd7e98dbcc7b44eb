"""Weight transfer between four ranks over gloo, for parallel layouts that need more than two ranks."""

import json
from typing import Any

import pytest

from rlscale.training.spec import WeightOwners
from tests.ranks.training.launch import report, run_ranks
from tests.ranks.training.megatron_families import write_families
from tests.ranks.training.megatron_transfer_ranks import CASES, NUM_RANKS, PUSHED
from tests.ranks.weights.conftest import engine_processes


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Reports of the ranks, which run once for all tests of this module."""
    models, folder = tmp_path_factory.mktemp("families"), tmp_path_factory.mktemp("reports")
    write_families(models)
    with engine_processes() as start:
        urls = [start(fault=fault).url for fault in ("", "", "packed", "dies_on_bucket")]
        words = (str(models), str(folder), json.dumps(urls))
        run_ranks("tests.ranks.training.megatron_transfer_ranks", *words, num_ranks=NUM_RANKS, timeout_s=300)
    return [report(folder, rank) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("how", list(WeightOwners))
@pytest.mark.parametrize("name", CASES)
def test_exported_weights_equal_loaded_ones(name: str, how: str, reports: list[dict[str, Any]]) -> None:
    assert all(found[name][how] for found in reports)


@pytest.mark.parametrize("name", PUSHED)
def test_owners_send_their_weights_to_every_engine(name: str, reports: list[dict[str, Any]]) -> None:
    found = [each[f"{name}, pushed"] for each in reports]
    assert all(each["same"] for each in found)  # the bytes of the Hugging Face folder
    senders = found[0]["senders"]
    assert len(senders) == {"ep4": 4, "ep2 pp2": 4, "tp2 ep4": 4, "tp2 ep2 etp2": 2, "cp2 ep2": 2}[name]
    whole = found[0]["all_bytes"]
    for rank, each in enumerate(found):
        assert each["reported"] == [whole, whole]
        assert (each["own_bytes"] > 0) == (rank in senders)
    assert sum(each["own_bytes"] for each in found) == whole


def test_every_rank_reports_an_owner_that_fails_and_none_hangs(reports: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(each["owner"] for each in reports):
        others = (
            f"WeightSyncError: trainer rank {found['victim']} must send its weights, got RuntimeError: no memory left"
        )
        assert found["error"] == ("RuntimeError: no memory left" if rank == found["victim"] else others)
        assert found["unconnected"].startswith("WeightSyncError: the weight channel must be connected")
        assert found["afterwards"]["same"]


def test_every_rank_reports_an_engine_that_dies_and_the_others_get_their_weights(reports: list[dict[str, Any]]) -> None:
    for found in (each["engine"] for each in reports):
        assert found["error"].startswith("EngineError: engine 3")
        assert found["afterwards"]["same"]
        assert found["reconnect_error"].startswith("engine 3")


def test_the_receiver_reports_a_corrupted_message(reports: list[dict[str, Any]]) -> None:
    first, *others = reports
    assert first["changed"].startswith("bucket ") and " from trainer rank 2 (" in first["changed"]
    assert "must arrive at rank 0 unchanged, got another checksum" in first["changed"]
    assert first["before"] > 0  # from earlier buckets
    assert all(found["changed"] == "" and found["before"] == 0 for found in others)
    assert all(found["afterwards"] for found in reports)  # no rank hangs


def test_all_ranks_write_weights_that_do_not_fit_in_one_file(reports: list[dict[str, Any]]) -> None:
    for found in (each["files"] for each in reports):
        assert found["same"] and found["writers"] == NUM_RANKS
        number = len(found["names"]) - 1
        files = [f"model-{i + 1:05}-of-{number:05}.safetensors" for i in range(number)]
        assert found["names"] == [*files, "model.safetensors.index.json"]
