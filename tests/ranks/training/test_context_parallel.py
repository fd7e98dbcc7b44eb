"""Context parallelism on two and four ranks compared with one: losses, gradients, weights and checkpoints."""

import json
import subprocess
import sys
from functools import cache as once
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlscale.engines.ports import free_port
from rlscale.training.fsdp.backend import FsdpBackend
from tests.ranks.training.context_parallel_ranks import BATCHES, EXACT, WORLDS, case_spec, train_rollouts
from tests.unit.training.rollouts import tiny_model, tiny_moe

pytestmark = pytest.mark.usefixtures("world")
ROOT = Path(__file__).parents[3]
SHAPES = [
    (ranks, size, name)
    for ranks, sizes in WORLDS.items()
    for size, names in sizes.items()
    for name in names
    if name in EXACT
]


@pytest.fixture(scope="module")
def model_path(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The dense model; the one with experts is in the folder next to it."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "experts").symlink_to(tiny_moe(cache))
    (folder / "dense").symlink_to(tiny_model(cache))
    return str(folder / "dense")


@pytest.fixture(scope="module")
def folder(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports and checkpoints of all worlds, which run once for all tests of this module."""
    folder = tmp_path_factory.mktemp("context")
    ports = [str(free_port("127.0.0.1")) for _ in range(2)]
    command = [sys.executable, "-m", "tests.ranks.training.context_parallel_ranks", model_path, str(folder), *ports]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def alone(world: None, model_path: str) -> Any:
    """One rank with the same micro-batches, by case: gradients of the first rollout, metrics of both, final weights."""

    @once
    def run(name: str) -> tuple[dict[str, Tensor], list[dict[str, Any]], dict[str, Tensor]]:
        backend = FsdpBackend(case_spec(name, model_path), rank=0, world_size=1)
        first = train_rollouts(backend, BATCHES[:1], num_data_ranks=1)
        gradients = gradient(backend)
        second = train_rollouts(backend, BATCHES[1:], num_data_ranks=1)
        return gradients, [*first, *second], {key: weight.clone() for key, weight in backend.weights()}

    return run


def gradient(backend: FsdpBackend) -> dict[str, Tensor]:
    """Gradient of the last step: without a first moment it is the state of the optimiser."""
    policy, found = backend.policy, {}
    with backend._offloader.resident("policy", "policy.optimizer"):
        for name, parameter in policy.model.named_parameters():
            if parameter.requires_grad:
                state = policy.optimizer.state[parameter]
                found[name] = state["momentum_buffer" if "momentum_buffer" in state else "exp_avg"].clone()
    return found


def reports(folder: Path, ranks: int, size: int, name: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{name}_{ranks}_{size}_{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "size", "name"), SHAPES)
def test_losses_and_metrics_are_those_of_one_rank(folder: Path, alone: Any, ranks: int, size: int, name: str) -> None:
    got, expected = reports(folder, ranks, size, name), alone(name)[1]
    for rollout, other in zip(got[0]["rollouts"], expected, strict=True):
        assert rollout["numbers"].keys() == other["numbers"].keys()
        for metric, value in other["numbers"].items():
            assert rollout["numbers"][metric] == pytest.approx(value, abs=1e-6, rel=1e-6), metric
        assert rollout["requested"].keys() == other["requested"].keys()
        for sample, values in other["requested"].items():
            assert rollout["requested"][sample] == pytest.approx(values, abs=1e-6, rel=1e-6)
    assert all(report == got[0] for report in got[1:]), "every rank reports the same"


@pytest.mark.parametrize(("ranks", "size", "name"), SHAPES)
def test_gradients_are_those_of_one_rank(
    folder: Path, alone: Any, model_path: str, ranks: int, size: int, name: str
) -> None:
    backend = FsdpBackend(case_spec(name, model_path), rank=0, world_size=1)
    backend.load(folder / f"{name}_{ranks}_{size}")  # a checkpoint of several ranks loads on one
    expected = alone(name)[0]
    assert max(float(value.abs().max()) for value in expected.values()) > 1e-2
    for key, value in gradient(backend).items():
        torch.testing.assert_close(value, expected[key], atol=1e-6, rtol=1e-6, msg=lambda text, k=key: f"{k}: {text}")


@pytest.mark.parametrize(("ranks", "size", "name"), SHAPES)
def test_full_weights_are_published_and_exported(folder: Path, alone: Any, ranks: int, size: int, name: str) -> None:
    made = folder / f"{name}_{ranks}_{size}"
    final, exported = load_file(made / "final.safetensors"), load_file(made / "hf" / "model.safetensors")
    assert exported.keys() == final.keys()
    assert all(torch.equal(weight, final[key]) for key, weight in exported.items())
    AutoModelForCausalLM.from_pretrained(made / "hf")
    for key, weight in alone(name)[2].items():
        torch.testing.assert_close(final[key], weight, atol=1e-5, rtol=1e-5, msg=lambda text, k=key: f"{k}: {text}")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("window", [None, 3, 20])
def test_attention_equals_that_of_whole_samples(folder: Path, ranks: int, window: int | None) -> None:
    for rank in range(ranks):
        errors = json.loads((folder / f"attention_{ranks}_{rank}.json").read_text())
        assert errors[str(window)] < 1e-6


def test_bfloat16_is_close_to_one_rank(folder: Path, alone: Any) -> None:
    got, expected = reports(folder, 2, 2, "bfloat16")[0]["rollouts"], alone("bfloat16")[1]
    for rollout, other in zip(got, expected, strict=True):
        assert rollout["numbers"]["entropy"] == pytest.approx(other["numbers"]["entropy"], rel=0.01)
        assert rollout["numbers"]["grad_norm"] == pytest.approx(other["numbers"]["grad_norm"], rel=0.05)


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 4)])
def test_a_loaded_trainer_continues_bit_for_bit(folder: Path, ranks: int, size: int) -> None:
    assert all(report["resumed_exactly"] for report in reports(folder, ranks, size, "gspo"))


def test_the_cases_reach_the_intended_code(alone: Any) -> None:
    numbers = {name: alone(name)[1][0]["numbers"] for name in EXACT}
    assert numbers["recomputed"]["teacher_kl"] > 1e-3 and numbers["whole_prompts"]["teacher_kl"] > 1e-3
    assert numbers["gspo"]["opsm_maskfrac"] > 0
    assert 0 < numbers["whole_rollout"]["mis_vetofrac"] < 1
    assert all(numbers[name]["routes/replayed"] == 1 for name in ("engine_routes", "policy_routes"))
    assert numbers["engine_routes"]["routes/differing"] > 0.5 and numbers["policy_routes"]["routes/differing"] > 0
    # The reference is where the policy began.
    assert alone("whole_rollout")[1][1]["numbers"]["rollout/kl"] > 1e-4
