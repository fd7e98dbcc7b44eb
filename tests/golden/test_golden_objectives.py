"""Results of functions of verl 0.9.1 and TRL 1.16.0 for SAPO, GPG, GDPO and batch scaling, reproduced.

The functions of the wheels were executed on the inputs of `golden.json`; TRL's are lines of `GRPOTrainer`.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlscale.algo.advantages import ESTIMATORS, AdvantageInputs
from rlscale.algo.losses import POLICY_LOSSES, ClipRange
from rlscale.algo.ragged import TokenLayout
from rlscale.algo.reduce import mean_per_token, mean_per_trajectory

FOLDER = Path(__file__).parent
INPUTS = json.loads((FOLDER / "golden.json").read_text())["inputs"]
GIVEN = {name: torch.tensor(values, dtype=torch.float64) for name, values in INPUTS.items()}
OBJECTIVES = json.loads((FOLDER / "golden_objectives.json").read_text())
LOSSES = {
    "compute_policy_loss_sapo": "sapo",
    "GRPOTrainer, loss_type=sapo": "sapo",
    "compute_policy_loss_gpg": "reinforce",
}
ENTRIES = OBJECTIVES["entries"]


@pytest.mark.parametrize("number", [i for i, entry in enumerate(ENTRIES) if entry["function"] in LOSSES])
def test_losses_and_gradients_of_peers(number: int) -> None:
    entry = ENTRIES[number]
    options, layout = entry["options"], TokenLayout.from_padded(GIVEN["mask"], valid_BL=torch.ones(4, 6))
    lp = GIVEN["lp"].clone().requires_grad_()
    clip = ClipRange(low=0.2, gate_pos=options.get("tau_pos", 1.0), gate_neg=options.get("tau_neg", 1.0))
    losses, _ = POLICY_LOSSES[LOSSES[entry["function"]]](
        layout.pack(lp),
        old_logprobs_T=layout.pack(GIVEN["old"]),
        advantages_T=layout.pack(GIVEN["advantages"]),
        layout=layout,
        clip=clip,
    )
    counts = layout.counts_per_sample()
    if options["aggregation"] == "token-mean":
        loss = mean_per_token(losses, layout=layout, num_tokens=int(counts.sum()))
    else:
        # TRL divides by all samples, also by one without a trainable token.
        num = len(counts) if entry["peer"].startswith("trl") else int((counts > 0).sum())
        loss = mean_per_trajectory(losses, layout=layout, denominators_S=counts.clamp(min=1), num_trajectories=num)
    (grad,) = torch.autograd.grad(loss, lp)
    torch.testing.assert_close(loss.detach(), torch.tensor(entry["result"], dtype=torch.float64), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(grad, torch.tensor(entry["grad"], dtype=torch.float64), rtol=1e-7, atol=1e-9)


def advantages(name: str, rewards: Tensor, **options: object) -> Tensor:
    """Advantages of responses of one token each, in groups of two."""
    num = len(rewards)
    layout = TokenLayout.from_lengths(torch.ones(num, dtype=torch.bool), lengths_S=torch.ones(num, dtype=torch.int64))
    given = AdvantageInputs(rewards_S=rewards, group_ids_S=torch.arange(num) // 2, layout=layout, **options)  # type: ignore[arg-type]
    return ESTIMATORS[name].compute(given).advantages_T


@pytest.mark.parametrize("number", [i for i, entry in enumerate(ENTRIES) if entry["function"] not in LOSSES])
def test_advantages_of_peers(number: int) -> None:
    entry = ENTRIES[number]
    expected = torch.tensor(entry["result"], dtype=torch.float64)
    scores, options = torch.tensor(OBJECTIVES["scores"], dtype=torch.float64), entry["options"]
    if entry["function"] == "compute_gpg_outcome_advantage":
        # No reward is 0 and no group has equal rewards, so that both factors are 1.
        actual = advantages("gpg", torch.tensor(options["rewards"], dtype=torch.float64), divide_by_std=False)
    elif "scale_rewards" in entry["function"]:
        actual = advantages("grpo", scores[:, 0], batch_std=True)
    else:
        weights = torch.tensor(options["weights"])
        actual = advantages("gdpo", scores.sum(dim=1), named_rewards_SK=scores, reward_weights_K=weights)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
