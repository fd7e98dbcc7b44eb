"""Two gloo ranks compared with one: the same metrics, and checkpoints of two ranks that load on one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlscale.training.fsdp.backend import FsdpBackend
from tests.planned_checkpoint import planned_size, tensor_bytes
from tests.ranks.training.fsdp_features import FEATURES, train_feature
from tests.ranks.training.fsdp_ranks import (
    BALANCED,
    BATCHES,
    REQUESTED,
    SAVED_AFTER,
    full_spec,
    train,
    user_spec,
    whole_rollout_spec,
)
from tests.ranks.training.launch import report, run_ranks
from tests.unit.training.rollouts import RAGGED, plan

pytestmark = pytest.mark.usefixtures("world")
ONE_RANK = [[[0, 1, 2, 3, 4, 5, 6, 7]]]


@pytest.fixture(scope="module")
def folder(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports and checkpoints of two ranks, which run once for all tests of this module."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "saved").mkdir()
    run_ranks("tests.ranks.training.fsdp_ranks", model_path, str(folder), timeout_s=240)
    return folder


@pytest.fixture(scope="module")
def alone(world: None, model_path: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The same three steps on one rank, in one micro-batch."""
    backend = FsdpBackend(full_spec(model_path), rank=0, world_size=1)
    steps = [train(backend, batch, ONE_RANK) for batch in BATCHES]
    return steps, {name: weight.clone() for name, weight in backend.weights()}


def test_two_ranks_report_the_metrics_of_one(folder: Path, alone: Any) -> None:
    got = report(folder, 0)["steps"]
    assert len(got) == 3
    for two, one in zip(got, alone[0], strict=True):
        assert two == pytest.approx(one, abs=1e-5, rel=1e-5)


def test_the_checkpoint_has_the_bytes_of_the_plan(folder: Path, model_path: str) -> None:
    size, found = planned_size(model_path), tensor_bytes(folder / "saved" / "tensors")
    assert found == {"model": size.weights, "exp_avg": size.optimizer / 2, "exp_avg_sq": size.optimizer / 2}


def test_two_ranks_end_with_the_weights_of_one(folder: Path, alone: Any) -> None:
    final = load_file(folder / "final.safetensors")
    assert list(alone[1]) and set(final) == set(alone[1])
    for name, weight in alone[1].items():
        torch.testing.assert_close(final[name], weight, atol=1e-5, rtol=1e-5, msg=name)


def test_rollout_wide_sums_are_equal_on_two_ranks(folder: Path, model_path: str) -> None:
    # A KL penalty in the rewards, whitening, and weights that are normalised over the rollout.
    backend = FsdpBackend(whole_rollout_spec(model_path, ref_path=str(folder / "hf")), rank=0, world_size=1)
    expected = [train(backend, batch, ONE_RANK) for batch in BATCHES[:2]]
    assert expected[0]["rollout/kl"] > 1e-4
    for rank in range(2):
        for two, one in zip(report(folder, rank)["whole_rollout"], expected, strict=True):
            assert two == pytest.approx(one, abs=1e-5, rel=1e-5)


def test_user_functions_are_equal_on_two_ranks(folder: Path, model_path: str) -> None:
    backend = FsdpBackend(user_spec(model_path), rank=0, world_size=1)
    expected = [train(backend, batch, ONE_RANK) for batch in BATCHES[:2]]
    assert 0 < expected[0]["rollout/bounded"] < 1 and expected[0]["factor"] < 1
    for two, one in zip(report(folder, 0)["user_functions"], expected, strict=True):
        assert two == pytest.approx(one, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_is_equal_on_two_ranks(folder: Path, model_path: str, name: str) -> None:
    expected = train_feature(name, model_path, rank=0, world_size=1)
    assert any(value for key, value in expected[-1].items() if key.endswith("grad_norm"))
    for two, one in zip(report(folder, 0)["features"][name], expected, strict=True):
        assert two == pytest.approx(one, abs=1e-5, rel=1e-4)


def test_other_micro_batches_are_equal_on_two_ranks(folder: Path) -> None:
    content = report(folder, 0)
    found = content["other_micro_batches"]
    # Rank 0: 3 rows of 76 and 2 of 11 tokens; rank 1: 3 of 33, and one token where it has no sample.
    slots, tokens = 3 * 76 + 2 * 11 + 3 * 33 + 1, sum(p + r for p, r in RAGGED) + 1
    assert found["padded"].pop("rollout/padding") == pytest.approx(1 - tokens / slots)
    for name in ("padded", "scoring"):
        assert found[name] == pytest.approx(content["steps"][0], abs=1e-5, rel=1e-4), name


def test_balancing_changes_the_shares_of_the_ranks_and_no_metric(folder: Path, model_path: str) -> None:
    backend = FsdpBackend(full_spec(model_path), rank=0, world_size=1)
    expected = train(backend, BALANCED, [[list(range(BALANCED.num_samples))]])
    found = report(folder, 0)["balanced"]
    assert found["shares"][0] != found["shares"][1]
    for metrics in found["metrics"]:
        assert metrics == pytest.approx(expected, abs=1e-5, rel=1e-4)


def test_all_ranks_report_the_same(folder: Path) -> None:
    assert report(folder, 0) == report(folder, 1)


def test_loading_on_as_many_ranks_continues_bit_for_bit(folder: Path) -> None:
    assert report(folder, 0)["resumed_exactly"]


def test_bfloat16_on_two_ranks(folder: Path, alone: Any) -> None:
    assert report(folder, 0)["bfloat16_is_finite"]
    assert report(folder, 0)["bfloat16_first"]["entropy"] == pytest.approx(alone[0][0]["entropy"], rel=0.02)


def test_every_rank_names_the_one_with_the_bad_loss(folder: Path) -> None:
    for rank in range(2):
        assert report(folder, rank)["nan"].startswith(
            "actor rank 1: the loss of optimiser step 0 must be finite, got nan"
        )


def test_every_rank_names_a_metric_that_only_one_has(folder: Path) -> None:
    for rank in range(2):
        message = report(folder, rank)["uneven"]
        assert message.startswith("every rank must have the same metrics, got rollout/many on rank 0 and not on all"), (
            message
        )


def test_a_checkpoint_of_two_ranks_loads_on_one(folder: Path, model_path: str, alone: Any) -> None:
    backend = FsdpBackend(full_spec(model_path), rank=0, world_size=1)
    backend.load(folder / "saved")
    saved = load_file(folder / "at_save.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in backend.weights())
    assert train(backend, BATCHES[SAVED_AFTER], ONE_RANK) == pytest.approx(alone[0][SAVED_AFTER], abs=1e-5, rel=1e-5)


def test_two_ranks_export_full_weights(folder: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder / "hf")
    final = load_file(folder / "final.safetensors")
    assert all(torch.equal(weight, final[name]) for name, weight in loaded.named_parameters())


def test_every_rank_gets_the_requested_logprobs_of_all(folder: Path, model_path: str) -> None:
    batch = replace(BATCHES[0], logprob_samples=REQUESTED, returns_columns=True)
    alone = FsdpBackend(full_spec(model_path), rank=0, world_size=1).train(batch, [plan(batch, ONE_RANK)])
    expected = alone.logprobs
    assert report(folder, 0)["requested"] == report(folder, 1)["requested"]
    got = {int(i): values for i, values in report(folder, 0)["requested"].items()}
    assert tuple(got) == tuple(expected) == REQUESTED
    for i, values in expected.items():
        assert got[i] == pytest.approx(values.tolist(), abs=1e-5)
    assert report(folder, 0)["request_changes_no_metric"]
    # So does every rank get the columns of all.
    assert report(folder, 0)["columns"] == report(folder, 1)["columns"]
    columns = report(folder, 0)["columns"]
    assert columns.keys() == alone.columns.keys() and "advantages" in columns
    for name, column in alone.columns.items():
        assert columns[name] == pytest.approx(column.tolist(), abs=1e-5)
