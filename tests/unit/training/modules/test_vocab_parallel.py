"""Logprobs, entropies and gradients of a vocabulary that is split over two gloo ranks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.linear_logprobs import HeadOptions, logprobs_from_hidden
from rlscale.algo.logprobs import logprobs_and_entropy
from rlscale.training.modules.vocab_parallel import make_vocab_shard

T, V, H = 13, 41, 6
SPLITS = ((0, 29), (29, V))  # uneven
TIMEOUT = timedelta(seconds=30)


def on_two_ranks(work: Callable[[int, dist.ProcessGroup], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Runs `work` on two threads of this process, each as a rank of a gloo group."""
    store = dist.HashStore()

    def run(rank: int) -> tuple[Tensor, ...]:
        return work(rank, dist.ProcessGroupGloo(store, rank, 2, TIMEOUT))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_two_parts_equal_the_whole(dtype: torch.dtype, atol: float, scale: float) -> None:
    torch.manual_seed(0)
    hidden, weight = scale * torch.randn(T, H, dtype=dtype), torch.randn(V, H, dtype=dtype)
    # Targets on both sides of the boundary, and at both ends.
    targets = torch.tensor([0, 28, 29, V - 1, *torch.randint(V, (T - 4,)).tolist()])
    by_logprob, by_entropy = torch.randn(T, dtype=dtype), torch.randn(T, dtype=dtype)

    def results(hidden: Tensor, weight: Tensor, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        (logprobs @ by_logprob + entropy @ by_entropy).backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None and weight.grad is not None
        return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad

    def part(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        first, last = SPLITS[rank]
        own, rows = hidden.clone().requires_grad_(), weight[first:last].clone().requires_grad_()
        shard = make_vocab_shard(group, first=first)
        options = HeadOptions(chunk_tokens=3, temperature=0.7, entropy_grad=True, shard=shard)
        return results(own, rows, *logprobs_from_hidden(own, rows, targets_T=targets, options=options))

    whole_hidden, whole_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    plain = logprobs_and_entropy(whole_hidden @ whole_weight.t(), targets_T=targets, temperature=0.7, entropy_grad=True)
    expected = results(whole_hidden, whole_weight, *plain)
    found = on_two_ranks(part)
    for got in found:
        torch.testing.assert_close(got[:3], expected[:3], atol=atol * scale, rtol=1e-5)
    torch.testing.assert_close(torch.cat([got[3] for got in found]), expected[3], atol=atol * scale, rtol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(found[0][:3], found[1][:3], strict=True))
