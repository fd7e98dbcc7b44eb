"""Results of functions of slime and verl (`golden.json`), reproduced."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlscale.algo.advantages import gae, leave_one_out, normalize_by_group
from rlscale.algo.kl import kl_estimate
from rlscale.algo.losses import POLICY_LOSSES, ClipRange
from rlscale.algo.ragged import TokenLayout
from rlscale.algo.reduce import mean_per_length, mean_per_token, mean_per_trajectory
from rlscale.algo.whitening import whiten

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
GIVEN = {name: torch.tensor(values, dtype=torch.float64) for name, values in GOLDEN["inputs"].items()}
VALID = torch.arange(6)[None] < torch.tensor(GOLDEN["lengths"])[:, None]
MASK = GIVEN["mask"].bool()
LAYOUT = TokenLayout.from_lengths(MASK[VALID], lengths_S=torch.tensor(GOLDEN["lengths"]))
GROUPS = torch.tensor([GOLDEN["groups"].index(name) for name in GOLDEN["groups"]])


def _ours(entry: dict[str, Any], lp: torch.Tensor) -> torch.Tensor:
    options, function = entry["options"], entry["function"]
    x = {name: values[VALID] for name, values in GIVEN.items() if values.ndim == 2}
    if function == "kl_penalty":
        return kl_estimate(lp[VALID], ref_logprobs_T=x["ref"], kind=options["kind"])
    if function.startswith("compute_policy_loss"):
        kind = {"vanilla": "clip"}.get(function.split("_")[-1], function.split("_")[-1])
        kind = "clip" if kind == "loss" else kind
        first = GIVEN["advantages"][:, :1].expand_as(GIVEN["advantages"])[VALID]
        dual = options["dual"] if kind == "clip" else None
        losses, _ = POLICY_LOSSES[kind](
            lp[VALID],
            old_logprobs_T=x["old"],
            advantages_T=first if "advantages" in options else x["advantages"],
            layout=LAYOUT,
            clip=ClipRange(low=options["low"], high=options["high"], dual=dual),
        )
        counts = LAYOUT.counts_per_sample()
        n = int((counts > 0).sum())
        if options.get("aggregation") == "token-mean":
            return mean_per_token(losses, layout=LAYOUT, num_tokens=int(counts.sum()))
        if options.get("aggregation") == "seq-mean-token-mean":
            return mean_per_trajectory(losses, layout=LAYOUT, denominators_S=counts.clamp(min=1), num_trajectories=n)
        if options.get("aggregation") == "seq-mean-token-sum-norm":
            return mean_per_length(losses, layout=LAYOUT, num_trajectories=n, length=6)
        return losses
    if function == "compute_gae_advantage_return":
        a, r = gae(
            x["token_rewards"], values_T=x["values"], layout=LAYOUT, gamma=options["gamma"], lambd=options["lam"]
        )
        return r if options["part"] == "returns" else whiten(a, mask_T=LAYOUT.mask_T)
    scores = GIVEN["scores"]
    if function == "compute_rloo_outcome_advantage":
        scores = leave_one_out(scores, group_ids_S=GROUPS)
    else:
        scores = normalize_by_group(scores, group_ids_S=GROUPS, divide_by_std=options["norm_adv_by_std_in_grpo"])
    return LAYOUT.spread(scores) * x["mask"]


@pytest.mark.parametrize("number", range(len(GOLDEN["entries"])))
def test_peers_numbers(number: int) -> None:
    entry = GOLDEN["entries"][number]
    lp = GIVEN["lp"].clone().requires_grad_()
    ours, theirs = _ours(entry, lp), torch.tensor(entry["result"], dtype=torch.float64)
    if theirs.ndim == 2:
        keep = MASK[VALID]
        torch.testing.assert_close(ours[keep].detach(), theirs[VALID][keep], rtol=1e-7, atol=1e-7)
    else:
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-7, atol=1e-7)
    if "grad_of_sum" in entry:
        weight = MASK[VALID].double() if ours.ndim else torch.ones((), dtype=torch.float64)
        (grad,) = torch.autograd.grad((ours * weight).sum(), lp)
        expected = torch.tensor(entry["grad_of_sum"], dtype=torch.float64)
        torch.testing.assert_close(grad[MASK], expected[MASK], rtol=1e-7, atol=1e-7)
