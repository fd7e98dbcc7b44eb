"""Responses divided over two gloo ranks (context parallelism) give the loss and gradient of undivided responses."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.property.test_objective import ALGORITHMS, loss_and_gradient
from tests.ranks.training.launch import run_ranks
from tests.ranks.training.loss_shards import PARTS, own_tokens, rollout


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Results of the ranks, which run once for all tests of this module."""
    folder = tmp_path_factory.mktemp("shards")
    run_ranks("tests.ranks.training.loss_shards", str(folder))
    return [load_file(Path(folder) / f"rank_{rank}.safetensors") for rank in range(2)]


def test_each_token_is_on_one_rank_and_long_responses_are_on_both() -> None:
    made = rollout()
    owned = [own_tokens(made, rank=rank).tolist() for rank in range(2)]
    assert sorted(owned[0] + owned[1]) == list(range(sum(made.lengths)))
    longest = made.rows([3]).tolist()
    assert all(set(tokens) & set(longest) for tokens in owned)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_shards_give_the_loss_and_gradient_of_undivided_responses(ranks: list[dict[str, Tensor]], name: str) -> None:
    made = rollout()
    loss, gradient, _ = loss_and_gradient(name, made, parts=PARTS)
    assert loss.abs() > 1e-4 and gradient.norm() > 1e-4
    for found in ranks:
        torch.testing.assert_close(found[f"{name}.loss"], loss, rtol=1e-9, atol=1e-11)
    # Each rank has the gradient of the tokens it holds; the sum is the gradient of the whole responses.
    total = ranks[0][f"{name}.gradient"] + ranks[1][f"{name}.gradient"]
    torch.testing.assert_close(total, gradient, rtol=1e-9, atol=1e-11)
    for rank, found in enumerate(ranks):
        others = torch.ones(len(gradient), dtype=torch.bool)
        others[own_tokens(made, rank=rank)] = False
        assert (found[f"{name}.gradient"][others] == 0).all()
