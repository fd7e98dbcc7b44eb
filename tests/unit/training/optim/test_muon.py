"""Muon compared with torch's implementation in bfloat16, and with the singular value decomposition."""

import pytest
import torch
from torch import Tensor, nn

from rlscale.training.optim.muon import MUON, MuonAdamW, orthogonalize


def optimizer(matrices: list[nn.Parameter], vectors: list[nn.Parameter], *, lr: float, decay: float) -> MuonAdamW:
    groups = [{"params": matrices, MUON: True}, {"params": vectors, MUON: False}]
    adam = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay, "fused": True}
    made = MuonAdamW([group | {"weight_decay": decay} for group in groups], momentum=0.95, adam=adam)
    for group in made.param_groups:
        group["lr"] = lr
    return made


def parameters(seed: int = 0) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in ((24, 8), (8, 24), (16, 16))], [nn.Parameter(torch.randn(7))]


def test_five_steps_are_those_of_torch() -> None:
    matrices, vectors = parameters()
    theirs, their_vectors = parameters()
    ours = optimizer(matrices, vectors, lr=0.02, decay=0.1)
    muon = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True)
    adam = torch.optim.AdamW(their_vectors, lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    before = [matrix.detach().clone() for matrix in matrices]
    for _ in range(5):
        for parameter, other in zip([*matrices, *vectors], [*theirs, *their_vectors], strict=True):
            parameter.grad = torch.randn_like(parameter)
            other.grad = parameter.grad.clone()
        ours.step()
        muon.step()
        adam.step()
    assert torch.equal(vectors[0], their_vectors[0])
    for matrix, other, start in zip(matrices, theirs, before, strict=True):
        # torch rounds to bfloat16, three digits, at each of the five iterations.
        assert float(((matrix - other).norm() / (matrix - start).norm()).detach()) < 0.03


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (3, 8, 6)])
def test_singular_values_are_near_one_and_vectors_are_kept(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    matrices = torch.randn(shape)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    got = orthogonalize(matrices)
    values: Tensor = torch.linalg.svdvals(got)
    assert got.shape == matrices.shape and values.min() > 0.5 and values.max() < 1.3
    turned = u.mT @ got @ vh.mT  # diagonal where the singular vectors are the same
    off_diagonal = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
    assert off_diagonal.abs().max() < 1e-4


def test_a_stack_is_as_many_matrices_and_zero_stays_zero() -> None:
    stack = torch.randn(3, 4, 6)
    stack[1] = 0
    for got, matrix in zip(orthogonalize(stack), stack, strict=True):
        torch.testing.assert_close(got, orthogonalize(matrix))
    assert not orthogonalize(stack)[1].any()


def test_parameters_without_a_gradient_are_skipped() -> None:
    matrices, _ = parameters()
    ours = optimizer(matrices, [], lr=0.02, decay=0.0)
    # Only the first matrix has a gradient.
    before = [matrix.detach().clone() for matrix in matrices]
    matrices[0].grad = torch.randn_like(matrices[0])
    ours.step()
    assert [bool(torch.equal(a, b)) for a, b in zip(matrices, before, strict=True)] == [False, True, True]
