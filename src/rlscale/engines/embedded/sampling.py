"""Samples tokens with counter-based random numbers and inversion of the cumulative distribution.

Every operation treats rows independently: a token depends only on logits, parameters, seed and position of its row.

Shape legend: B rows, V vocabulary, R rows that restrict the vocabulary, N different tokens of all responses.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlscale.types import SamplingParams

BLOCK = 128  # tokens in a block of the two-level search

UInt64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds_B: UInt64, positions_B: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Random numbers [B] in [0, 1) that depend on (seed, position) alone: the upper 24 bits of SplitMix64.

    A position counts from the first token of the prompt, so an interrupted and resumed answer draws the same numbers.
    """
    z = _mix(_mix(seeds_B + _GOLDEN) + positions_B.astype(np.uint64) * _GOLDEN)
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(z: UInt64) -> UInt64:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


class RowParams:
    """Sampling parameters of B rows, stored as columns. Rows without a request are greedy."""

    def __init__(self, num_rows: int) -> None:
        self.seeds = np.zeros(num_rows, np.uint64)
        self.temperature = np.ones((num_rows, 1), np.float32)
        self.top_p = np.ones(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)  # 0: off
        self.min_p = np.zeros((num_rows, 1), np.float32)
        self.greedy = np.ones(num_rows, np.bool_)
        # `blocked_ids` of a row have probability 0 before this position.
        self.blocked_until = np.zeros(num_rows, np.int64)
        self.blocked_ids: list[tuple[int, ...]] = [()] * num_rows
        # Repetition, frequency and presence penalty, and how often each token of the response occurs, of a row.
        self.penalties: dict[int, tuple[float, float, float]] = {}
        self.counts: dict[int, Mapping[int, int]] = {}

    def set(
        self,
        row: int,
        params: SamplingParams,
        seed: int,
        *,
        blocked_until: int = 0,
        blocked_ids: tuple[int, ...] = (),
        counts: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Sets the parameters of a row.

        Args:
            counts: number of occurrences of each token of the response, kept up to date by the caller; read with
                penalties only.
        """
        greedy = params.temperature == 0
        self.seeds[row] = np.uint64(seed % 2**64)
        self.greedy[row] = greedy
        self.temperature[row] = 1.0 if greedy else params.temperature
        self.top_p[row] = 1.0 if greedy else params.top_p
        self.top_k[row] = 0 if greedy else max(params.top_k, 0)
        self.min_p[row] = 0.0 if greedy else params.min_p
        self.blocked_until[row], self.blocked_ids[row] = blocked_until, blocked_ids
        self._set_penalties(row, _penalties(params) if params.has_penalties else None, counts)

    def clear(self, row: int) -> None:
        self.temperature[row], self.top_p[row], self.top_k[row], self.greedy[row] = 1.0, 1.0, 0, True
        self.min_p[row], self.blocked_until[row], self.blocked_ids[row] = 0.0, 0, ()
        self._set_penalties(row, None, {})

    def copy(self, source: int, target: int) -> None:
        columns = (self.seeds, self.temperature, self.top_p, self.top_k, self.min_p, self.greedy, self.blocked_until)
        for column in columns:
            column[target] = column[source]
        self.blocked_ids[target] = self.blocked_ids[source]
        self._set_penalties(target, self.penalties.get(source), self.counts.get(source, {}))

    def _set_penalties(self, row: int, penalties: tuple[float, float, float] | None, counts: Mapping[int, int]) -> None:
        if penalties is None:
            self.penalties.pop(row, None)
            self.counts.pop(row, None)
        else:
            self.penalties[row], self.counts[row] = penalties, counts

    def penalise(self, logits_BV: Tensor) -> None:
        """Applies the penalties to tokens that the responses contain, in place, in SGLang's order."""
        rows = [row for row, counts in self.counts.items() if counts and row < len(logits_BV)]
        if not rows:
            return
        # One entry for each token of a response, all rows after each other.
        sizes = [len(self.counts[row]) for row in rows]
        row_N = torch.from_numpy(np.repeat(rows, sizes)).to(logits_BV.device)
        ids_N = torch.tensor([token for row in rows for token in self.counts[row]], device=logits_BV.device)
        penalties = [self.penalties[row] for row in rows]
        columns = np.repeat(np.array(penalties, np.float32), sizes, axis=0)
        repetition_N, frequency_N, presence_N = torch.from_numpy(columns).to(logits_BV.device).unbind(1)
        counts = [count for row in rows for count in self.counts[row].values()]
        counts_N = torch.tensor(counts, dtype=torch.float32, device=logits_BV.device)
        found_N = logits_BV[row_N, ids_N] - counts_N * frequency_N - presence_N
        logits_BV[row_N, ids_N] = torch.where(found_N < 0, found_N * repetition_N, found_N / repetition_N)

    def blocked(self, positions_B: npt.NDArray[np.int64]) -> tuple[list[int], list[int]] | None:
        """Rows and ids, aligned, with probability 0 at these positions; None if there are none."""
        rows = np.flatnonzero(positions_B < self.blocked_until[: len(positions_B)]).tolist()
        pairs = [(row, token) for row in rows for token in self.blocked_ids[row]]
        return ([row for row, _ in pairs], [token for _, token in pairs]) if pairs else None


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


class Workspace:
    """Buffers of `draw` that are kept between steps: allocating them took longer than using them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def buffers(self, num_rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Two uninitialized float32 tensors [num_rows, width], valid until the next call."""
        needed = 2 * num_rows * width
        if self._memory.numel() < needed or self._memory.device != device:
            self._memory = torch.empty(needed, device=device)
        first, second = self._memory[:needed].view(2, num_rows, width)
        return first, second


def draw(
    logits_BV: Tensor, params: RowParams, positions_B: npt.NDArray[np.int64], workspace: Workspace | None = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Tokens [B] and their logprobs [B] under the full distribution at the row's temperature.

    With x = logits / temperature, p = softmax(x) and u from `uniforms`: token = min{i: p_0 + ... + p_i > u}.
    A greedy row uses the maximum, and its logprob is at temperature 1. As in SGLang, `top_p`, `top_k` and `min_p`
    restrict the draw but not the logprobs; penalties change both, and tokens blocked by `min_new_tokens` have
    probability 0 in both.
    """
    num, vocab_size = logits_BV.shape
    device = logits_BV.device
    # Padded to a whole number of blocks with tokens of probability 0.
    scaled, full = (workspace or Workspace()).buffers(num, -(-vocab_size // BLOCK) * BLOCK, device)
    scaled[:, :vocab_size] = logits_BV
    scaled[:, vocab_size:] = -torch.inf
    params.penalise(scaled)
    blocked = params.blocked(positions_B)
    if blocked is not None:
        rows, ids = (torch.tensor(part, device=device) for part in blocked)
        scaled.index_put_((rows, ids), torch.tensor(-torch.inf, device=device))
    if (params.temperature[:num] != 1.0).any():
        scaled /= torch.from_numpy(params.temperature[:num]).to(device)
    torch.softmax(scaled, dim=-1, out=full)
    greedy, restricted = params.greedy[:num], (params.top_p[:num] < 1.0) | (params.top_k[:num] > 0)
    if greedy.all():
        ids = full.argmax(dim=-1)
    else:
        uniform = torch.from_numpy(uniforms(params.seeds[:num], positions_B)).to(device).unsqueeze(1)
        probs = full
        if params.min_p[:num].any():
            least = probs.amax(dim=-1, keepdim=True) * torch.from_numpy(params.min_p[:num]).to(device)
            probs = probs.where(probs >= least, 0.0)
        ids = _invert(probs, uniform)
        if restricted.any():
            rows = torch.from_numpy(np.flatnonzero(restricted)).to(device)
            top_p = torch.from_numpy(params.top_p[:num]).to(device)[rows]
            top_k = torch.from_numpy(params.top_k[:num]).to(device)[rows]
            ids[rows] = _invert_restricted(probs[rows], uniform[rows], top_p=top_p, top_k=top_k)
        if greedy.any():
            ids = torch.where(torch.from_numpy(greedy).to(device), full.argmax(dim=-1), ids)
    # A drawn token is never so unlikely that its float32 probability has lost bits.
    logprobs = full.gather(1, ids.unsqueeze(1)).squeeze(1).double().log_()
    if device.type == "cpu":
        return ids.numpy(), logprobs.numpy()
    # One transfer for both; token ids are exact in float64.
    both = torch.stack((ids.double(), logprobs)).cpu().numpy()
    return both[0].astype(np.int64), both[1]


def _invert(probs_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """Finds the first token whose cumulative sum exceeds `uniform` times the total: first its block, then its index."""
    # One block needs one search; for tiny models the difference is noticeable in a step.
    if probs_BV.shape[1] == BLOCK:
        return _search(probs_BV.cumsum(dim=-1), uniform_B1 * probs_BV.sum(dim=-1, keepdim=True)).squeeze(1)
    blocks = probs_BV.view(probs_BV.shape[0], -1, BLOCK)
    block, remainder = _search_block(blocks.sum(dim=-1), uniform_B1)
    inside = blocks.take_along_dim(block.unsqueeze(2), dim=1).squeeze(1)
    return (block * BLOCK + _search(inside.cumsum(dim=-1), remainder)).squeeze(1)


def _search_block(masses: Tensor, uniform_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the block of `masses` [B, N] that contains `uniform` times the total, and the remainder in it: [B, 1]."""
    sums = masses.cumsum(dim=-1)
    target = uniform_B1 * sums[:, -1:]
    block = _search(sums, target)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    return block, target - before


def _search(sums: Tensor, target: Tensor) -> Tensor:
    # Strictly below the total: otherwise rounding could select a token after the last one with probability > 0.
    total = sums[:, -1:]
    below = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, below, right=True).clamp_(max=sums.shape[1] - 1)


def _invert_restricted(probs_RV: Tensor, uniform_R1: Tensor, *, top_p: Tensor, top_k: Tensor) -> Tensor:
    """As `_invert` among the most likely tokens. As in SGLang, both limits apply to the full distribution."""
    ordered, ids = probs_RV.sort(dim=-1, descending=True, stable=True)
    # Probability of all more likely tokens: top_p keeps a token if it is at most top_p.
    before = ordered.cumsum(dim=-1) - ordered
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    limit = torch.where(top_k > 0, top_k, ordered.shape[1]).unsqueeze(1)
    keep = (before <= top_p.unsqueeze(1)) & (rank < limit)
    index = _invert(ordered * keep, uniform_R1)
    return ids.gather(1, index.unsqueeze(1)).squeeze(1)
