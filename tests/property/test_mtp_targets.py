"""Targets of layers for multi-token prediction: no target and no embedding comes from another sample."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.multi_token_prediction import roll_tensor

from rlscale.training.megatron.model.attention import PackedSamples
from rlscale.training.megatron.model.model_inputs import (
    MegatronMicrobatch,
    PackingOptions,
    pack_samples,
    pad_samples,
)
from rlscale.training.megatron.model.mtp_targets import count_targets, shift_ids
from rlscale.training.packing.context_parallel import ContextGroup
from rlscale.types import TrainBatch
from tests.unit.training.rollouts import make_batch, plan

CPU = torch.device("cpu")
LENGTHS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=5)


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    """Ragged samples of distinct tokens, of which any response tokens are trainable."""
    batch = make_batch(draw(LENGTHS))
    size = len(batch.tokens)
    kept = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    tokens = np.arange(1, size + 1, dtype=np.int32)
    return replace(batch, tokens=tokens, loss_mask=(batch.loss_mask * kept).astype(np.uint8))


def expected_targets(batch: TrainBatch, depth: int) -> dict[int, int]:
    """Target -> the token at whose position the layer predicts it, by a loop over the samples."""
    found = {}
    for start, stop in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        for i in range(start, stop - depth - 1):
            if batch.loss_mask[i + depth + 1]:
                found[int(batch.tokens[i + depth + 1])] = int(batch.tokens[i])
    return found


def found_targets(micro: MegatronMicrobatch, depth: int) -> dict[int, int]:
    own, ids = micro.mtp[depth - 1], micro.input_ids.flatten()
    mask = own.mask if own.shard is None else own.mask[own.shard.own]
    rows, targets = own.logit_rows[: len(mask)][mask], own.targets[: len(mask)][mask]
    return dict(zip(targets.tolist(), ids[rows].tolist(), strict=True))


@settings(max_examples=40)
@given(batches(), st.integers(1, 3), st.booleans())
def test_a_target_follows_its_position_in_the_same_sample(batch: TrainBatch, depth: int, is_padded: bool) -> None:
    make = pad_samples if is_padded else pack_samples
    micro = make(batch, range(batch.num_samples), options=PackingOptions(device=CPU, num_mtp=3))
    expected = expected_targets(batch, depth)
    assert found_targets(micro, depth) == expected
    assert len(expected) == count_targets(batch, plan(batch, [[range(batch.num_samples)]]), depth=depth)


@settings(max_examples=40)
@given(batches(), st.integers(1, 3), st.sampled_from([2, 4]))
def test_context_ranks_divide_the_targets(batch: TrainBatch, depth: int, size: int) -> None:
    found: dict[int, int] = {}
    for index in range(size):
        context = ContextGroup(index=index, size=size, group=None)  # type: ignore[arg-type]  # no collective is called
        options = PackingOptions(device=CPU, context=context, num_mtp=depth)
        micro = pack_samples(batch, range(batch.num_samples), options=options)
        own = found_targets(micro, depth)
        assert not found.keys() & own.keys()
        found |= own
    assert found == expected_targets(batch, depth)


@settings(max_examples=40)
@given(batches(), st.integers(1, 3))
def test_embeddings_are_those_of_later_tokens_of_the_sample(batch: TrainBatch, depth: int) -> None:
    micro = pack_samples(batch, range(batch.num_samples), options=PackingOptions(device=CPU, num_mtp=depth))
    assert isinstance(micro.params, PackedSamples)
    ids = micro.input_ids
    for later in micro.params.later_ids:
        ids, _ = roll_tensor(ids, packed_seq_params=micro.params)  # Megatron-core's own, one token at a time
        assert torch.equal(ids, later)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 5))
def test_shifted_ids_are_whole_samples_shifted(chunks: list[int], shift: int) -> None:
    widths = 4 * np.array(chunks, dtype=np.int64)
    ids = np.arange(1, widths.sum() + 1)
    parts = np.split(ids, np.cumsum(widths)[:-1])
    expected = [np.pad(part[shift:], (0, min(shift, len(part)))) for part in parts]
    shifted = shift_ids(ids, widths, shift=shift)
    assert np.array_equal(shifted, np.concatenate(expected))
