"""Logprobs, entropies and gradients of a vocabulary that is split over two gloo ranks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlscale.algo.linear_distillation import (
    DenseTeacher,
    HiddenTeacher,
    TeacherRequest,
    TeacherRows,
    TopTeacher,
    logprobs_and_teacher_kl,
)
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


@pytest.mark.parametrize("kind", ["hidden", "dense", "top", "all"])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_divergence_from_a_teacher_on_two_parts_is_that_of_the_whole(kind: str, direction: str) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(T, H, dtype=torch.float64), torch.randn(V, H, dtype=torch.float64)
    other, table = torch.randn(T, 4, dtype=torch.float64), torch.randn(V, 4, dtype=torch.float64)
    targets, slope = torch.randint(V, (T,)), torch.randn(T, dtype=torch.float64)
    log_q = torch.log_softmax(other @ table.T / 0.7, dim=-1)
    top, ids = log_q.topk(V if kind == "all" else 6, dim=-1)

    def teacher(first: int, last: int) -> TeacherRows:
        if kind == "hidden":
            return HiddenTeacher(hidden_TG=other, weight_VG=table[first:last])
        if kind == "dense":
            return DenseTeacher(logprobs_TV=log_q)
        return TopTeacher(ids_TK=ids, logprobs_TK=top, has_others=kind == "top")

    def results(first: int, last: int, options: HeadOptions) -> tuple[Tensor, ...]:
        own, rows = hidden.clone().requires_grad_(), weight[first:last].clone().requires_grad_()
        request = TeacherRequest(rows=teacher(first, last), direction=direction)
        *_, kl = logprobs_and_teacher_kl(own, rows, targets_T=targets, request=request, options=options)
        (kl @ slope).backward()  # type: ignore[no-untyped-call]
        assert own.grad is not None and rows.grad is not None
        return kl.detach(), own.grad, rows.grad

    def part(rank: int, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        first, last = SPLITS[rank]
        shard = make_vocab_shard(group, first=first)
        return results(first, last, HeadOptions(chunk_tokens=3, temperature=0.7, shard=shard))

    expected, found = results(0, V, HeadOptions(chunk_tokens=100, temperature=0.7)), on_two_ranks(part)
    for got in found:
        torch.testing.assert_close(got[:2], expected[:2], atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(torch.cat([got[2] for got in found]), expected[2], atol=1e-12, rtol=1e-9)
