"""The expected answer of SGLang's checker, compared with SHA-256 over the parameters as the server builds them."""

import hashlib
import logging

import pytest
import torch
from torch import Tensor

from rlscale.errors import WeightSyncError
from rlscale.weight_types import RankChecksums
from rlscale.weights.sglang_checksums import SglangChecksums


def sha(tensor: Tensor) -> str:
    """SGLang's `tensor_hash` of a tensor on the CPU."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{int.from_bytes(hashlib.sha256(data).digest()[:8], 'big'):016x}"


def pad_rows(tensor: Tensor, number: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(number - tensor.shape[0], tensor.shape[1])])


def make_layer() -> dict[str, Tensor]:
    torch.manual_seed(0)
    prefix = "model.layers.0."
    return {
        "model.embed_tokens.weight": torch.randn(100, 8).bfloat16(),
        prefix + "self_attn.q_proj.weight": torch.randn(16, 8).bfloat16(),
        prefix + "self_attn.k_proj.weight": torch.randn(8, 8).bfloat16(),
        prefix + "self_attn.v_proj.weight": torch.randn(8, 8).bfloat16(),
        prefix + "self_attn.q_proj.bias": torch.randn(16).bfloat16(),
        prefix + "self_attn.k_proj.bias": torch.randn(8).bfloat16(),
        prefix + "self_attn.v_proj.bias": torch.randn(8).bfloat16(),
        prefix + "self_attn.q_norm.weight": torch.randn(4).bfloat16(),
        prefix + "mlp.gate_proj.weight": torch.randn(12, 8).bfloat16(),
        prefix + "mlp.up_proj.weight": torch.randn(12, 8).bfloat16(),
        "model.norm.weight": torch.randn(8).bfloat16(),
    }


def server_parameters(w: dict[str, Tensor]) -> dict[str, Tensor]:
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    qkv = {
        attention + f"qkv_proj.{kind}": torch.cat([w[attention + f"{part}_proj.{kind}"] for part in "qkv"])
        for kind in ("weight", "bias")
    }
    # 100 rows are padded to 128, a multiple of 64.
    return {
        "model.embed_tokens.weight": torch.cat([w["model.embed_tokens.weight"], torch.zeros(28, 8).bfloat16()]),
        **qkv,
        attention + "q_norm.weight": w[attention + "q_norm.weight"],
        # The 12 units of the MLP are padded to 32.
        mlp + "gate_up_proj.weight": torch.cat(
            [pad_rows(w[mlp + f"{part}_proj.weight"], 32) for part in ("gate", "up")]
        ),
        "model.norm.weight": w["model.norm.weight"],
    }


def add_all(weights: dict[str, Tensor], names: list[str], *, tp_sizes: tuple[int, ...] = (1,)) -> SglangChecksums:
    sums = SglangChecksums(tp_sizes)
    for name in names:
        sums.add(name, weights[name])
    return sums


@pytest.mark.parametrize("backwards", [False, True])
def test_fused_and_padded_parameters(backwards: bool) -> None:
    weights = make_layer()
    # Fused parameters must not depend on the order in which their parts are added.
    names = list(weights)[::-1] if backwards else list(weights)
    held = {name: sha(tensor) for name, tensor in server_parameters(weights).items()}
    sums = add_all(weights, names)
    assert {holder.name: set(digests) for holder, digests in sums.expected().items()} == {
        name: {digest} for name, digest in held.items()
    }
    sums.compare([RankChecksums(checksums=held)], engine="engine 0")


@pytest.mark.parametrize("name", list(server_parameters(make_layer())))
def test_one_flipped_bit_names_engine_and_parameter(name: str) -> None:
    weights = make_layer()
    held = server_parameters(weights)
    # Some of the server's parameters are the very tensors that were sent, so the bit is changed in a copy.
    held[name] = held[name].clone()
    held[name].view(-1).view(torch.uint8)[3] ^= 1
    with pytest.raises(WeightSyncError, match=rf"engine 3 must hold {name.replace('.', '[.]')} with checksum"):
        answer = RankChecksums(checksums={n: sha(t) for n, t in held.items()})
        add_all(weights, list(weights)).compare([answer], engine="engine 3")


def test_parameters_that_cannot_be_compared_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    weights = make_layer()
    sums = add_all(weights, list(weights))
    held = {name: sha(tensor) for name, tensor in server_parameters(weights).items()}
    with caplog.at_level(logging.WARNING):
        sums.compare([RankChecksums(checksums={**held, "something.else": "00"})], engine="engine 0")
    assert "1 parameters could not be compared, e.g. something.else" in caplog.text
    with pytest.raises(WeightSyncError, match="engine 0 must have parameters with expected names"):
        sums.compare([RankChecksums(checksums={"other.weight": "00"})], engine="engine 0")


def rank_parameters(weights: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Parameters of a tensor-parallel rank of a server."""
    held = server_parameters(weights)
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    for kind in ("weight", "bias"):
        parts = [weights[attention + f"{part}_proj.{kind}"] for part in "qkv"]
        held[attention + f"qkv_proj.{kind}"] = torch.cat([part.chunk(size)[rank] for part in parts])
    # The MLP has 12 units, and every rank a multiple of 32.
    gate, up = (pad_rows(weights[mlp + f"{part}_proj.weight"], 32 * size) for part in ("gate", "up"))
    held[mlp + "gate_up_proj.weight"] = torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
    held[mlp + "down_proj.weight"] = pad_rows(weights[mlp + "down_proj.weight"].T, 32 * size).chunk(size)[rank].T
    held["model.embed_tokens.weight"] = held["model.embed_tokens.weight"].chunk(size)[rank]
    held[attention + "o_proj.weight"] = weights[attention + "o_proj.weight"].chunk(size, dim=1)[rank]
    return held


def split_server(size: int) -> tuple[SglangChecksums, list[dict[str, Tensor]]]:
    """Expected checksums, and the parameters of all ranks."""
    weights = make_layer() | {
        "model.layers.0.mlp.down_proj.weight": torch.randn(8, 12).bfloat16(),
        "model.layers.0.self_attn.o_proj.weight": torch.randn(8, 16).bfloat16(),
    }
    sums = add_all(weights, list(weights), tp_sizes=(1, size))
    return sums, [rank_parameters(weights, rank, size) for rank in range(size)]


def answers(ranks: list[dict[str, Tensor]]) -> list[RankChecksums]:
    return [
        RankChecksums(checksums={name: sha(tensor) for name, tensor in held.items()}, rank=rank, size=len(ranks))
        for rank, held in enumerate(ranks)
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_hold_shares_of_the_weights(size: int, caplog: pytest.LogCaptureFixture) -> None:
    sums, ranks = split_server(size)
    with caplog.at_level(logging.WARNING):
        sums.compare(answers(ranks), engine="engine 0")
    assert caplog.text == ""


@pytest.mark.parametrize("size", [2, 4])
def test_a_wrong_share_names_the_rank(size: int) -> None:
    for name in split_server(size)[1][0]:
        sums, ranks = split_server(size)
        changed = ranks[1][name].contiguous().clone()
        changed.view(-1).view(torch.uint8)[3] ^= 1
        ranks[1][name] = changed
        with pytest.raises(WeightSyncError, match=rf"engine 5 rank 1 must hold {name.replace('.', '[.]')} with"):
            sums.compare(answers(ranks), engine="engine 5")
    # The share of another rank.
    sums, ranks = split_server(size)
    ranks[0], ranks[1] = ranks[1], ranks[0]
    with pytest.raises(WeightSyncError, match=r"engine 5 rank 0 must hold model\.embed_tokens\.weight with"):
        sums.compare(answers(ranks), engine="engine 5")


def test_a_model_with_images_has_other_names_on_the_server(caplog: pytest.LogCaptureFixture) -> None:
    qkv, norm = torch.randn(12, 4), torch.randn(8)
    sent = {"model.visual.blocks.0.attn.qkv.weight": qkv, "model.language_model.norm.weight": norm}
    rows = [torch.cat([part[rank * 2 : rank * 2 + 2] for part in qkv.chunk(3)]) for rank in range(2)]
    for size in (1, 2):
        expected = SglangChecksums([size])
        for name, tensor in sent.items():
            expected.add(name, tensor)
        for rank in range(size):
            held = {"visual.blocks.0.attn.qkv_proj.weight": qkv if size == 1 else rows[rank], "model.norm.weight": norm}
            checksums = {name: sha(tensor) for name, tensor in held.items()}
            expected.compare([RankChecksums(rank=rank, size=size, checksums=checksums)], engine="engine 0")
    assert not caplog.records, "each parameter was compared"
