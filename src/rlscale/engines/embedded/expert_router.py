"""Choice of the experts of each token, by softmax or sigmoid scores.

Shape legend: N tokens, H hidden width, E experts, K experts of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlscale.models.decoder_config import RouterScore, Routing

BEST_OF_GROUP = 2
"""The score of a group is the sum of the scores of so many of its best experts (DeepSeek-V3)."""


class ExpertRouter:
    """Weights of all experts for each token.

    Args:
        routing: rule of the model.
        weight: [E, H]
        bias: of the logits. [E]
        choice_bias: added to sigmoid scores for the choice, not to the weights. [E] float32
    """

    def __init__(
        self, routing: Routing, weight: Tensor, *, bias: Tensor | None = None, choice_bias: Tensor | None = None
    ) -> None:
        self._routing, self._weight, self._bias, self._choice_bias = routing, weight, bias, choice_bias
        self.expert_ids_NK: Tensor | None = None  # experts of each token of the last call, in any order

    def __call__(self, x_NH: Tensor) -> Tensor:
        """Weight of each expert for each token, 0 for experts that are not selected. [N, E]"""
        routing = self._routing
        if routing.score == RouterScore.sigmoid:
            # In float32 as in transformers: rounded scores would be equal more often.
            scores = F.linear(x_NH.float(), self._weight.float()).sigmoid()
            indices = self._choose(scores)
            top_NK = scores.gather(1, indices)
        else:
            logits = F.linear(x_NH, self._weight, self._bias)
            scores = logits if routing.score == RouterScore.chosen_softmax else _softmax(logits)
            top_NK, indices = scores.topk(routing.num_per_token, dim=-1)
        self.expert_ids_NK = indices
        if routing.score == RouterScore.chosen_softmax:
            top_NK = _softmax(top_NK)
        elif routing.normalized:
            top_NK = top_NK / top_NK.sum(dim=-1, keepdim=True)
        if routing.scale != 1.0:
            top_NK = top_NK * routing.scale
        return torch.zeros(scores.shape, device=x_NH.device).scatter(-1, indices, top_NK).to(x_NH.dtype)

    def _choose(self, scores_NE: Tensor) -> Tensor:
        """Experts with the highest biased scores, of the best groups of experts alone. [N, K]"""
        routing = self._routing
        biased = scores_NE if self._choice_bias is None else scores_NE + self._choice_bias
        if routing.groups_per_token < routing.num_groups:
            groups = biased.view(len(biased), routing.num_groups, -1)
            of_group = groups.topk(BEST_OF_GROUP, dim=-1).values.sum(dim=-1)
            best = of_group.topk(routing.groups_per_token, dim=-1).indices
            is_best = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best, True)
            biased = groups.masked_fill(~is_best.unsqueeze(-1), -torch.inf).flatten(1)
        return biased.topk(routing.num_per_token, dim=-1).indices


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(dim=-1, dtype=torch.float32)
