"""Routing replay from the engine, for several parallel layouts: tokens go to the experts that generated them."""

from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.ranks.training.launch import report, run_ranks
from tests.ranks.training.megatron_routing_ranks import CUTS, LAYOUTS
from tests.tiny_model import write_tiny_qwen3_moe


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Report of rank 0 of two ranks, which run once for all tests of this module."""
    folder = tmp_path_factory.mktemp("routes")
    model = write_tiny_qwen3_moe(folder / "model")
    weights = load_file(model / "model.safetensors")
    # The router scores are almost equal, so the engine's rounding sends tokens to other experts.
    gates = {name: weight for name, weight in weights.items() if name.endswith("mlp.gate.weight")}
    undecided = {name: (weight[:1] + 0.03 * weight).contiguous() for name, weight in gates.items()}
    save_file(weights | undecided, model / "model.safetensors", metadata={"format": "pt"})
    run_ranks("tests.ranks.training.megatron_routing_ranks", str(model), str(folder), timeout_s=240)
    return report(folder, 0)


def test_every_token_uses_the_experts_of_the_engine(found: dict[str, Any]) -> None:
    # The engine computes in bfloat16 and the trainer in float32, so their routers sometimes differ.
    assert [step["routes/replayed"] for step in found["steps"]] == [1, 1]
    assert 0 < found["steps"][0]["routes/differing"] < 0.3


def test_replay_reduces_the_logprob_difference_to_the_engine(found: dict[str, Any]) -> None:
    assert found["difference to the engine"] < 0.5 * found["difference without"]


def test_arbitrary_routes_are_replayed(found: dict[str, Any]) -> None:
    assert found["moves"] > 0.1 and found["follows"] < 1e-4


def test_tokens_without_a_route_are_counted_and_use_the_router(found: dict[str, Any]) -> None:
    assert found["stays"] < 1e-5
    lengths = found["lengths"]
    for step, cut in zip(found["steps with other routes"], CUTS, strict=True):
        samples = [i for micro in cut for i in micro]
        numbers = {i: lengths[i] - 1 for i in samples}  # the last token predicts nothing
        share = 1 - numbers.get(0, 0) / sum(numbers.values())
        assert step["routes/replayed"] == pytest.approx(share, abs=1e-9)


def test_losses_that_balance_experts_are_means_over_micro_batches_and_ranks(found: dict[str, Any]) -> None:
    one, three = found["balancing"]
    assert one > 1e-3 and three == pytest.approx(one, rel=1e-4)
    # With equal samples everywhere the mean is that of one micro-batch in every layout.
    assert found["balancing by layout"] == pytest.approx(dict.fromkeys(LAYOUTS, one), rel=1e-4)


def test_routers_are_trained(found: dict[str, Any]) -> None:
    assert len(found["gates"]) == 2 and min(found["gates"]) > 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_parallel_layouts_replay_the_same_routes(found: dict[str, Any], layout: str) -> None:
    assert max(found["layouts"][layout].values()) < 1e-5, found["layouts"]
