"""Packing of the samples of a batch, end to end, into one row for the model.

A prefix that several samples share is packed once: "12+3=" answered by "15" and by "16" is `12+3=156`, not
`12+3=1512+3=16`. Only attention sees whole samples (see `TreeRows`); every other layer computes a token once. A sample
keeps its own entries in the loss: an entry whose logits and target another one has, too, is only copied.

Shape legend: T packed tokens, E tokens of the samples end to end, R trainable tokens among them, U entries of the
output layer (R, unless some are equal), S samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlscale.algo.ragged import Sums, TokenLayout
from rlscale.data.prefix_tree import build_prefix_tree, mix_routes
from rlscale.models.image_processor import ImageProcessor
from rlscale.training.attention.context_attention import SpanLayout
from rlscale.training.attention.packed import PackedLayout, build_packed_layout
from rlscale.training.batch_invariant.engine_rows import EngineRows
from rlscale.training.packing.context_parallel import TokenShard
from rlscale.training.packing.image_rows import ImageRows, PackedImages, lay_out_images
from rlscale.training.packing.prefix_sharing import SharedRows, TreeRows, find_shared_rows, lay_out_tree
from rlscale.training.packing.token_rows import TokenRows
from rlscale.training.packing.token_runs import TokenRuns, count_up_to
from rlscale.types import Int64, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedLayout:
    """Samples as rows of one width, padded at the end, where causal attention never looks."""

    num_tokens: int  # of the samples
    num_slots: int  # tokens that are computed


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One packed row, and the positions in it that predict a trainable token.

    A micro-batch without trainable tokens holds one masked entry, so that every rank computes the same graph and calls
    the same collectives; its loss and gradient are exactly 0.

    With context parallelism, T and `targets` are this rank's share of the tokens. All other columns stay [R];
    `gather_shards` turns the results of the share, or of the entries U, into [R].
    """

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T] within the sample, from 0; of a model with images [4, 1, T]
    packing: PackedLayout | SpanLayout | PaddedLayout
    logit_rows: Tensor  # [U] packed position whose logits predict the token; one before a fork occurs several times
    targets: Tensor  # [U]
    layout: TokenLayout  # of the R tokens
    sample_indices: Int64  # [S] into the batch, in packed order
    batch_runs: TokenRuns  # [R] rows of the tokens in the columns of the batch
    shard: TokenShard | None = None
    entries: SharedRows | None = None  # U to R; None: they are the same
    engine_rows: EngineRows | None = None  # with `train.true_on_policy_mode`
    images: PackedImages | None = None  # of a model with images
    token_rows: TokenRows | None = None  # of the T positions, where routes are replayed on FSDP2

    @property
    def batch_rows(self) -> Int64:
        """Row of each token in the columns of the batch, computed again by each call. [R]"""
        return self.batch_runs.indices()

    @property
    def num_shards(self) -> int:
        """Number of ranks that compute the same loss of this micro-batch."""
        return 1 if self.shard is None else self.shard.context.size

    @property
    def is_whole(self) -> bool:
        """Whether the entries of `logit_rows` are the R tokens."""
        return self.shard is None and self.entries is None

    def entry_rows(self) -> Tensor:
        """Index into R of one token for each entry of `logit_rows`. [U]"""
        if self.entries is not None:
            return self.entries.pick
        if self.shard is None:
            return torch.arange(len(self.targets), device=self.targets.device)
        # A rank that computes no token has one entry, which is not used.
        own = self.shard.own
        return own if len(own) else own.new_zeros(len(self.targets))

    def gather_shards(self, entries: Tensor) -> Tensor:
        """Column of all R tokens from the entries of `logit_rows`; a collective of the context group, if any."""
        if self.entries is not None:
            return self.entries.expanded(entries)
        return entries if self.shard is None else self.shard.gather(entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRows:
    """Samples end to end, in order of ascending length."""

    indices: Int64  # [S] into the batch
    lengths: Int64  # [S]
    starts: Int64  # [S] in E
    offsets: Int64  # [S] in the columns of the batch
    prompt_lens: Int64  # [S]
    tokens: Int64  # [E]
    runs: TokenRuns  # [R] indices of the trainable tokens in E; one, masked, where no token is trainable
    run_samples: Int64  # [K] sample of each run
    targets: Int64  # [R] their tokens
    mask: npt.NDArray[np.bool_]  # [R]
    tree: TreeRows | None  # None: no rows are shared
    images: ImageRows | None = None
    is_placeholder: bool = False  # no samples: the only token is none of this rank

    @property
    def positions(self) -> Int64:
        """Position of each token within its sample. [E]"""
        longest = count_up_to(int(self.lengths[-1]))
        return np.concatenate([longest[:length] for length in self.lengths.tolist()])

    @property
    def trainable(self) -> Int64:
        """Index of each trainable token in E, ascending. [R]"""
        return self.runs.indices()

    @property
    def batch_rows(self) -> Int64:
        """Row of each token in the columns of the batch. [E]"""
        # E counts through all samples: minus the start of its sample it is the position, plus the offset the batch row.
        rows = np.repeat(self.offsets - self.starts, self.lengths)
        rows += np.arange(len(rows))
        return rows

    @property
    def trainable_batch_runs(self) -> TokenRuns:
        """Rows of the trainable tokens in the columns of the batch. [R]"""
        return self.runs.moved((self.offsets - self.starts)[self.run_samples])

    def token_rows(
        self, places_E: Int64, *, num_places: int, is_here_E: npt.NDArray[np.bool_] | bool = True
    ) -> TokenRows:
        """Rows of the batch by position of this rank, which computes the tokens `is_here_E` at `places_E`.

        Takes longer than the rest of packing.
        """
        is_here = np.full(len(self.tokens), not self.is_placeholder) & is_here_E
        return TokenRows.from_places(self.batch_rows[is_here], places_E[is_here], num_places=num_places)

    def layout(self, device: torch.device) -> TokenLayout:
        """Samples and mask of the R tokens."""
        ids = np.repeat(self.run_samples, self.runs.lengths)
        return TokenLayout(
            mask_T=to_device(self.mask, device),
            sample_ids_T=to_device(ids, device),
            num_samples=len(self.indices),
        )


def pack(
    batch: TrainBatch,
    sample_indices: Sequence[int],
    *,
    device: torch.device,
    share_prompts: bool = False,
    processor: ImageProcessor | None = None,
    with_token_rows: bool = False,
) -> Microbatch:
    """Packs some samples of a batch, ordered by length (then by the order given).

    Args:
        share_prompts: pack common prefixes once, which only `packed_attention` supports.
        processor: of the images of a model that has any.
        with_token_rows: for the replay of routes.
    """
    rows = lay_out_samples(batch, sample_indices, share_prompts=share_prompts, processor=processor)
    # The logits before a token predict it.
    logit_rows, tokens, positions, tree = rows.runs.moved(-1).indices(), rows.tokens, rows.positions, rows.tree
    targets, entries, places = rows.targets, None, None
    logit_rows[0] = max(logit_rows[0], 0)  # the masked entry of an empty micro-batch may be at 0
    if tree is not None:
        row_of = np.empty(len(tokens), dtype=np.int64)
        row_of[tree.pick] = np.arange(len(tree.pick))
        places = row_of[tree.originals]
        logit_rows = places[logit_rows]
        tokens, positions = tokens[tree.pick], positions[tree.pick]
        kept, entries = _equal_entries(logit_rows, targets, device=device)
        logit_rows, targets = logit_rows[kept], targets[kept]
    images = None
    position_ids = to_device(positions[None], device)
    if rows.images is not None and processor is not None:
        pick = slice(None) if tree is None else tree.pick
        images = rows.images.packed(processor, rows.images.features[pick], device)
        three = rows.images.positions[:, pick]
        # transformers takes the positions of the text as a first row.
        position_ids = to_device(np.concatenate([positions[None], three])[:, None], device)
    return Microbatch(
        input_ids=to_device(tokens[None], device),
        position_ids=position_ids,
        packing=build_packed_layout(rows.lengths, device=device, rows=tree),
        logit_rows=to_device(logit_rows, device),
        targets=to_device(targets, device),
        layout=rows.layout(device),
        sample_indices=rows.indices,
        batch_runs=rows.trainable_batch_runs,
        entries=entries,
        images=images,
        token_rows=_token_rows(rows, places, num_places=len(tokens)) if with_token_rows else None,
    )


def _token_rows(rows: SampleRows, places_E: Int64 | None, *, num_places: int) -> TokenRows:
    """Rows of all tokens at their places; None: in order."""
    return rows.token_rows(np.arange(num_places) if places_E is None else places_E, num_places=num_places)


def _equal_entries(logit_rows_R: Int64, targets_R: Int64, *, device: torch.device) -> tuple[Int64, SharedRows | None]:
    """Indices of the entries that are computed [U], and their map to all; None: no two of them are equal."""
    # One number for each pair: sorting them is much faster than sorting pairs.
    pairs = logit_rows_R * (targets_R.max() + 1) + targets_R
    _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    if len(first) == len(logit_rows_R):
        return np.arange(len(logit_rows_R)), None
    originals = first[inverse]
    kept = np.flatnonzero(originals == np.arange(len(originals)))
    return kept, find_shared_rows(originals, device=device)


def pad(
    batch: TrainBatch, sample_indices: Sequence[int], *, device: torch.device, with_token_rows: bool = False
) -> Microbatch:
    """Pads the same samples to the length of the longest one: ids and positions are [S, width].

    `logit_rows` are indices into S * width. For kernels that cannot read packed samples; `pack` computes less.

    Args:
        with_token_rows: for the replay of routes.
    """
    rows = lay_out_samples(batch, sample_indices, share_prompts=False)
    num_samples, width = len(rows.lengths), int(rows.lengths[-1])
    # Slot of a token: the start of its padded row plus its position.
    slots = rows.positions + np.repeat(np.arange(num_samples) * width, rows.lengths)
    ids = np.zeros(num_samples * width, dtype=np.int64)
    ids[slots] = rows.tokens
    positions = np.tile(np.arange(width), (num_samples, 1))
    return Microbatch(
        input_ids=to_device(ids.reshape(num_samples, width), device),
        position_ids=to_device(positions, device),
        packing=PaddedLayout(num_tokens=len(rows.tokens), num_slots=num_samples * width),
        logit_rows=to_device(slots[np.maximum(rows.trainable - 1, 0)], device),
        targets=to_device(rows.targets, device),
        layout=rows.layout(device),
        sample_indices=rows.indices,
        batch_runs=rows.trainable_batch_runs,
        token_rows=_token_rows(rows, slots, num_places=num_samples * width) if with_token_rows else None,
    )


def count_padding(micros: Iterable[Microbatch]) -> Sums:
    """Share of padding among the computed tokens, as a metric; no metric where samples are packed."""
    layouts = [micro.packing for micro in micros]
    padded = [layout for layout in layouts if isinstance(layout, PaddedLayout)]
    if not padded:
        return {}
    slots, tokens = sum(each.num_slots for each in padded), sum(each.num_tokens for each in padded)
    return {"padding": (torch.tensor(float(slots - tokens)), torch.tensor(float(slots)))}


def lay_out_samples(
    batch: TrainBatch, sample_indices: Sequence[int], *, share_prompts: bool, processor: ImageProcessor | None = None
) -> SampleRows:
    """Rows of some samples. No samples at all become the first token of the batch, masked."""
    is_empty = not len(sample_indices)
    indices = np.asarray([0] if is_empty else sample_indices, dtype=np.int64)
    # Of these samples only: a step may consist of thousands of micro-batches.
    lengths = np.ones(1, dtype=np.int64) if is_empty else batch.offsets[indices + 1] - batch.offsets[indices]
    order = np.argsort(lengths, kind="stable")
    indices, lengths_S = indices[order], lengths[order]
    starts, offsets = np.cumsum(lengths_S) - lengths_S, batch.offsets[indices]
    # Slices, not an index for each token: whole samples are copied at the speed of memory.
    slices = list(map(slice, offsets.tolist(), (offsets + lengths_S).tolist()))
    tokens = np.concatenate([batch.tokens[each] for each in slices], dtype=np.int64)
    is_trainable = np.concatenate([batch.loss_mask[each] for each in slices]) != 0
    if is_empty:
        is_trainable[:] = False
    assert not is_trainable[starts].any(), "the first token of a sample has no token before it that predicts it"
    runs = TokenRuns.from_mask(is_trainable)
    mask = np.ones(len(runs), dtype=bool)
    if not len(runs):
        runs, mask = TokenRuns(starts=np.zeros(1, np.int64), lengths=np.ones(1, np.int64)), np.zeros(1, dtype=bool)
    prompt_lens = batch.prompt_lens[indices].astype(np.int64)
    images = None if processor is None else lay_out_images(batch, indices, lengths_S, tokens, processor)
    tree = None
    if share_prompts and len(indices) > 1:
        # Placeholders of different pictures are the same token.
        keys = tokens if images is None else images.keys(tokens)
        if batch.routes is not None:
            keys = mix_routes(keys, np.concatenate([batch.routes[each] for each in slices]))
        found = build_prefix_tree(keys, starts, lengths_S, prompt_lens)
        tree = lay_out_tree(found, starts, lengths_S) if found.has_shared() else None
    return SampleRows(
        indices=indices,
        lengths=lengths_S,
        starts=starts,
        offsets=offsets,
        prompt_lens=prompt_lens,
        tokens=tokens,
        runs=runs,
        # No run extends over two samples, as the first token of a sample is not trainable.
        run_samples=np.searchsorted(starts, runs.starts, side="right") - 1,
        targets=runs.take(tokens),
        mask=mask,
        tree=tree,
        images=images,
        is_placeholder=is_empty,
    )


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor on `device`; the copy may still be under way."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
