"""Weights of four ranks brought together over gloo, from parallel layouts that two ranks cannot have."""

from typing import Any

import pytest

from tests.unit.training.launch import report, run_ranks
from tests.unit.training.megatron_families import write_families
from tests.unit.training.megatron_transfer_ranks import CASES, NUM_RANKS


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks found; they run once for all tests of this module."""
    models, folder = tmp_path_factory.mktemp("families"), tmp_path_factory.mktemp("reports")
    write_families(models)
    run_ranks("tests.unit.training.megatron_transfer_ranks", str(models), str(folder), num_ranks=NUM_RANKS)
    return [report(folder, rank) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("how", ["on one", "spread"])
@pytest.mark.parametrize("name", CASES)
def test_weights_come_back_bit_for_bit(name: str, how: str, reports: list[dict[str, Any]]) -> None:
    assert all(found[name][how] for found in reports)


def test_a_message_that_arrives_changed_is_told_by_its_receiver(reports: list[dict[str, Any]]) -> None:
    first, *others = reports
    assert first["changed"].startswith("bucket ") and " from trainer rank 2 (" in first["changed"]
    assert "must arrive at rank 0 as it was sent, got another checksum" in first["changed"]
    assert first["before"] > 0  # the buckets before it
    assert all(found["changed"] == "" and found["before"] == 0 for found in others)
    assert all(found["afterwards"] for found in reports)  # nobody was left waiting


def test_weights_that_do_not_fit_in_one_file_are_written_by_all_ranks(reports: list[dict[str, Any]]) -> None:
    for found in (each["files"] for each in reports):
        assert found["same"] and found["writers"] == NUM_RANKS
        number = len(found["names"]) - 1
        files = [f"model-{i + 1:05}-of-{number:05}.safetensors" for i in range(number)]
        assert found["names"] == [*files, "model.safetensors.index.json"]
