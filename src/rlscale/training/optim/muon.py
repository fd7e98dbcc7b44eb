"""Muon for matrices that are sharded over ranks, AdamW for all other parameters.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", with their scale of the learning rate. torch's
Muon supports neither shards nor stacks of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPS = 1e-7
MUON = "muon"
"""Key of a parameter group: True where Muon steps it."""
TRANSPOSED = "transposed"
"""Key of a parameter group: True where the columns of its matrices are outputs. Absent: the rows are."""


class MuonAdamW(torch.optim.Optimizer):
    """Steps groups with `MUON` by Muon and the others by AdamW. Every group has `lr` and `weight_decay`.

    With G the gradient of a matrix W [rows, columns] and B its mean: B = mu B + (1 - mu) G, U = (1 - mu) G + mu B
    (Nesterov), W = (1 - lr wd) W - lr sqrt(max(1, rows / columns)) orthogonalize(U), with rows and columns exchanged
    where W is `TRANSPOSED`. A parameter of three dimensions is a stack of matrices.

    Invariant: `step` is a collective of the ranks that share the parameters. One rank orthogonalises a whole matrix, so
    that the number of ranks changes only rounding; matrices are assigned to ranks in the order of the parameters.

    Example:
        MuonAdamW([{"params": matrices, "muon": True}, {"params": others, "muon": False}], momentum=0.95, adam={})
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, momentum: float, adam: dict[str, Any]) -> None:
        """`adam` are the arguments of torch's AdamW."""
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._momentum = momentum
        self._adam: torch.optim.AdamW | None = None
        others = [group for group in self.param_groups if not group[MUON]]
        if others:
            self._adam = torch.optim.AdamW(others, **adam)
            # Shared groups and state: callers set rates and save moments as of one optimiser.
            self._adam.param_groups = others
            self._adam.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # returns no loss
        """Steps every parameter with a gradient; a collective of the ranks that share the parameters."""
        assert closure is None, "the gradient is computed before"
        if self._adam is not None:
            self._adam.step()
        for i, group in enumerate(self.param_groups):
            if not group[MUON]:
                continue
            parameters = [p for p in group["params"] if p.grad is not None]
            updates = self._updates(i, parameters, [self._direction(p) for p in parameters])
            for parameter, (update, scale) in zip(parameters, updates, strict=True):
                weight = local_shard(parameter)
                weight.mul_(1.0 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * scale)

    def _updates(
        self, index: int, parameters: Sequence[Tensor], directions: Sequence[Tensor]
    ) -> list[tuple[Tensor, float]]:
        """The rank's rows of the orthogonalised directions of group `index`, each with the factor on its rate."""
        updates = orthogonalize_all(parameters, directions)
        is_transposed = self.param_groups[index].get(TRANSPOSED, False)
        matrices = [p.mT if is_transposed else p for p in parameters]
        return [(update, rate_factor(p)) for update, p in zip(updates, matrices, strict=True)]

    def _direction(self, parameter: nn.Parameter) -> Tensor:
        """The rank's rows of the Nesterov direction U, which is orthogonalised."""
        state = self.state[parameter]
        if not state:
            state.update(muon_state(parameter))
        assert parameter.grad is not None, "parameters without a gradient are skipped"
        grad, mean = local_shard(parameter.grad), local_shard(state["momentum_buffer"])
        mean.lerp_(grad, 1.0 - self._momentum)
        return grad.lerp(mean, self._momentum)


def muon_state(parameter: Tensor) -> dict[str, Tensor]:
    """State of a matrix before its first step."""
    return {"momentum_buffer": torch.zeros_like(parameter)}


def rate_factor(matrix: Tensor) -> float:
    """Factor of Jordan et al. on the learning rate of a matrix: tall ones make larger steps."""
    rows, columns = matrix.shape[-2:]
    return math.sqrt(max(1.0, rows / columns))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximates U V^T of the SVD U S V^T of each matrix by a quintic Newton-Schulz iteration.

    With Jordan's coefficients few iterations bring singular values to between 0.7 and 1.2, not to 1.

    Args:
        matrices: one matrix or a stack. [..., rows, columns] float32

    Returns:
        The same shape and type. Computed in bfloat16 on a GPU, where it is several times as fast.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[-2] > x.shape[-1]
    # The Gram matrix is of the shorter side. The norm bounds the singular values by 1, where the iteration converges.
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = x.mT if is_tall else x
    return result.to(matrices.dtype)


def orthogonalize_all(parameters: Sequence[Tensor], shards: Sequence[Tensor]) -> list[Tensor]:
    """`orthogonalize` for matrices that are sharded by rows; a collective of the ranks that share them.

    Args:
        parameters: with their sharding.
        shards: this rank's rows of the matrices to orthogonalise; of a stack, its matrices.

    Returns:
        This rank's rows of the results.
    """
    results: dict[int, Tensor] = {}
    cut = []
    for i, (parameter, shard) in enumerate(zip(parameters, shards, strict=True)):
        if _shard_group(parameter) is not None and parameter.dim() == 2:
            cut.append(i)
        else:
            results[i] = orthogonalize(shard) if shard.numel() else shard
    group = _shard_group(parameters[cut[0]]) if cut else None
    num_ranks = 1 if group is None else dist.get_world_size(group)
    for start in range(0, len(cut), num_ranks):
        assert group is not None, "matrices are sharded over ranks"
        # A round of one matrix per rank: all_to_all collects matrix i on rank i, and sends its rows back.
        owned = cut[start : start + num_ranks]
        shapes = [tuple(parameters[i].shape) for i in owned]
        whole = _gather_own(group, shapes, [shards[i] for i in owned])
        own = whole if not whole.numel() else orthogonalize(whole)
        results.update(zip(owned, _scatter_rows(group, shapes, own), strict=True))
    return [results[i] for i in range(len(parameters))]


def local_shard(tensor: Tensor) -> Tensor:
    """The rank's part of a tensor, or the tensor itself where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Ranks that share the rows of a parameter; None: this rank has all of them."""
    if not isinstance(parameter, DTensor):
        return None
    cut = [axis for axis, placement in enumerate(parameter.placements) if isinstance(placement, Shard)]
    assert len(cut) <= 1 and all(p.dim == 0 for p in parameter.placements if isinstance(p, Shard)), "rows are sharded"
    if not cut or parameter.device_mesh.size(cut[0]) == 1:
        return None
    return parameter.device_mesh.get_group(cut[0])


def _rows_of(num_rows: int, num_ranks: int) -> list[int]:
    """Number of rows of each rank, as FSDP shards them."""
    most = -(-num_rows // num_ranks)
    return [min(max(num_rows - rank * most, 0), most) for rank in range(num_ranks)]


def _sizes(group: dist.ProcessGroup, shapes: Sequence[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """Elements sent to the owner of each matrix (rank i owns matrix i), and received from each rank of the own one."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    sent = [_rows_of(rows, num_ranks)[rank] * columns for rows, columns in shapes]
    received = [0] * num_ranks
    if rank < len(shapes):
        rows, columns = shapes[rank]
        received = [count * columns for count in _rows_of(rows, num_ranks)]
    return sent + [0] * (num_ranks - len(shapes)), received


def _gather_own(group: dist.ProcessGroup, shapes: Sequence[tuple[int, ...]], shards: Sequence[Tensor]) -> Tensor:
    """Matrix that this rank owns, empty where there are fewer matrices than ranks; a collective of `group`."""
    sent, received = _sizes(group, shapes)
    flat = torch.cat([shard.flatten() for shard in shards])
    out = flat.new_empty(sum(received))
    dist.all_to_all_single(out, flat, output_split_sizes=received, input_split_sizes=sent, group=group)
    rank = dist.get_rank(group)
    return out.view(shapes[rank]) if rank < len(shapes) else out


def _scatter_rows(group: dist.ProcessGroup, shapes: Sequence[tuple[int, ...]], own: Tensor) -> list[Tensor]:
    """Inverse of `_gather_own`: this rank's rows of all matrices, from their owners; a collective of `group`."""
    received, sent = _sizes(group, shapes)
    out = own.new_empty(sum(received))
    flat = own.flatten().contiguous()
    dist.all_to_all_single(out, flat, output_split_sizes=received, input_split_sizes=sent, group=group)
    parts = out.split(received[: len(shapes)])  # type: ignore[no-untyped-call]
    return [part.view(-1, columns) for part, (_, columns) in zip(parts, shapes, strict=True)]
