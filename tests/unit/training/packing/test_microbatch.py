"""Packing of samples: the logits and gradients of separate samples, and prompts that are computed once."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlscale.models.hf_models import load_causal_lm
from rlscale.training.attention.packed import PACKED_ATTENTION
from rlscale.training.fsdp.step import compute_logits
from rlscale.training.packing.microbatch import Microbatch, pack
from rlscale.types import TrainBatch
from tests.unit.training.rollouts import RAGGED, SHARED, make_batch, with_equal_prompts

CPU = torch.device("cpu")


def load(path: str, kernel: str) -> PreTrainedModel:
    return load_causal_lm(path, dtype=torch.float32, attn_implementation=kernel).train()


def unpacked_logits(model: PreTrainedModel, batch: TrainBatch, micro: Microbatch) -> Tensor:
    """One forward pass for each sample by itself, in packed order. [R, V]"""
    rows = []
    for i in micro.sample_indices:
        start, stop = batch.offsets[i], batch.offsets[i + 1]
        ids = torch.from_numpy(batch.tokens[start:stop].astype(np.int64))[None]
        # The logits before a token predict it.
        trainable = np.flatnonzero(batch.loss_mask[start:stop])
        rows.append(model(input_ids=ids, use_cache=False).logits[0, trainable - 1])
    return torch.cat(rows)


def prefixes(batch: TrainBatch, chosen: Sequence[int]) -> set[tuple[int, ...]]:
    """Distinct prefixes of some samples, each one row of their tree."""
    samples = [batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].tolist() for i in chosen]
    return {tuple(sample[: end + 1]) for sample in samples for end in range(len(sample))}


def weighted_sum(logits: Tensor) -> Tensor:
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    return (logits * weights).sum()


@pytest.mark.parametrize("kernel", [PACKED_ATTENTION, "eager"])
def test_packed_equals_every_sample_alone(model_path: str, kernel: str) -> None:
    batch = make_batch(RAGGED)
    micro = pack(batch, range(len(RAGGED)), device=CPU)
    packed, alone = load(model_path, kernel), load(model_path, "sdpa")
    got, expected = compute_logits(packed, micro), unpacked_logits(alone, batch, micro)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    weighted_sum(got).backward()
    weighted_sum(expected).backward()
    for (name, a), b in zip(packed.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_only_trainable_tokens_get_logits() -> None:
    batch = make_batch([(2, 3), (1, 2)])
    batch.loss_mask[3] = 0  # e.g. a tool's answer
    micro = pack(batch, [0, 1], device=CPU)
    assert micro.sample_indices.tolist() == [1, 0]  # by length
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert micro.batch_rows.tolist() == [6, 7, 2, 4]
    assert micro.targets.tolist() == batch.tokens[[6, 7, 2, 4]].tolist()
    assert micro.logit_rows.tolist() == [0, 1, 4, 6]
    assert micro.layout.sample_ids_T.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("share", [False, True])
def test_columns_are_those_of_each_sample_in_order_of_length(share: bool) -> None:
    batch = make_batch([(2, 5), (3, 1), (1, 4), (2, 2)])
    batch.loss_mask[[4, 9, 16]] = 0
    micro = pack(batch, [3, 0, 2], device=CPU, share_prompts=share)
    assert micro.sample_indices.tolist() == [3, 2, 0]
    rows = [np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in (3, 2, 0)]
    trainable = [each[batch.loss_mask[each] > 0] for each in rows]
    assert micro.input_ids.tolist() == [batch.tokens[np.concatenate(rows)].tolist()]
    assert micro.position_ids.tolist() == [[i for each in rows for i in range(len(each))]]
    assert micro.batch_rows.tolist() == np.concatenate(trainable).tolist()
    assert micro.targets.tolist() == batch.tokens[np.concatenate(trainable)].tolist()
    assert micro.layout.sample_ids_T.tolist() == [i for i, each in enumerate(trainable) for _ in each]


@pytest.mark.parametrize("samples", [[], [0]])
def test_a_microbatch_without_trainable_tokens_keeps_one_masked_entry(samples: list[int]) -> None:
    batch = make_batch([(3, 2)])
    batch.loss_mask[:] = 0
    micro = pack(batch, samples, device=CPU)
    assert micro.layout.mask_T.tolist() == [False]
    assert len(micro.targets) == len(micro.logit_rows) == len(micro.batch_rows) == 1


def test_a_trainable_first_token_is_refused() -> None:
    batch = make_batch([(1, 2)])
    batch.loss_mask[0] = 1
    with pytest.raises(AssertionError, match="first token"):
        pack(batch, [0], device=CPU)


@pytest.mark.parametrize("chosen", [range(len(SHARED)), [8, 2, 7], [0, 1, 6], [7, 8]])
def test_a_shared_prompt_is_computed_once_and_changes_nothing_else(model_path: str, chosen: Sequence[int]) -> None:
    batch = with_equal_prompts()
    shared = pack(batch, chosen, device=CPU, share_prompts=True)
    assert shared.input_ids.shape == shared.position_ids.shape == (1, len(prefixes(batch, chosen)))
    whole = pack(batch, chosen, device=CPU)
    for name in ("batch_rows", "sample_indices"):
        assert getattr(shared, name).tolist() == getattr(whole, name).tolist()
    assert shared.gather_shards(shared.targets).tolist() == whole.targets.tolist()
    models = [load(model_path, PACKED_ATTENTION) for _ in range(2)]
    logits = [compute_logits(model, micro) for model, micro in zip(models, (shared, whole), strict=True)]
    logits[0] = shared.gather_shards(logits[0])
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    for each in logits:
        weighted_sum(each).backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_equal_entries_of_the_loss_are_computed_once() -> None:
    batch = make_batch([(2, 3), (2, 3), (2, 2)])
    batch.tokens[:] = [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3, 7]
    batch.loss_mask[7] = 0  # the 3 of the second sample, e.g. a further path of a trajectory that trains it elsewhere
    micro = pack(batch, [0, 1, 2], device=CPU, share_prompts=True)
    assert micro.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 4, 3]]
    # In order of length: 3 7, 3 4 5, 4 6. The equal 3 and 4 have one entry each, and a fork has one for each branch.
    assert list(zip(micro.logit_rows.tolist(), micro.targets.tolist(), strict=True)) == [
        (1, 3),
        (2, 7),
        (2, 4),
        (3, 5),
        (3, 6),
    ]
    assert micro.gather_shards(micro.targets).tolist() == [3, 7, 3, 4, 5, 4, 6]
    assert micro.layout.sample_ids_T.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert micro.batch_rows.tolist() == [12, 13, 2, 3, 4, 8, 9]
    # The gradient of a shared entry is the sum of those of its samples.
    column = torch.arange(5.0, requires_grad=True)
    (micro.gather_shards(column) * torch.arange(1.0, 8.0)).sum().backward()
    assert column.grad is not None and column.grad.tolist() == [1 + 3, 2, 4 + 6, 5, 7]


def test_samples_without_a_common_prompt_are_packed_normally() -> None:
    batch = make_batch(RAGGED)
    assert pack(batch, [0, 3], device=CPU, share_prompts=True).packing.shared is None


def test_only_the_replay_of_routes_needs_token_rows() -> None:
    batch = make_batch(RAGGED)
    assert pack(batch, range(len(RAGGED)), device=CPU).token_rows is None
    rows = pack(batch, range(len(RAGGED)), device=CPU, with_token_rows=True).token_rows
    assert rows is not None and rows.places.tolist() == list(range(len(batch.tokens)))
