"""Contiguous copies of the cached keys and values of the requests that decode.

The tokens of a request lie anywhere in SGLang's paged cache. Gathering all of them for each decoding step takes as long
as the attention itself. Here each request has an entry, to which a step appends the keys and values of one token:

    paged cache  ── load: a new request, a longer entry ──> entries ──> attention of all entries of one width
                 ── append: one token of each request ───>

Entries of one width are next to each other without a gap, so that attention reads them as one tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MIN_WIDTH = 64  # tokens; a wider entry is a power of two, so that at most half of it is padding
MAX_BYTES = 2**31  # of all entries; above it the paged cache is gathered for each step


@dataclass(kw_only=True)
class _Entry:
    width: int
    index: int  # among the entries of this width
    num_keys: int = 0  # tokens that it holds
    is_stale: bool = True  # loaded from the paged cache before the next attention


@dataclass(frozen=True, kw_only=True)
class BlockStep:
    """One decoding step of the N entries of one width.

    Attributes:
        tokens: indices in the batch of the entries' requests, [N].
        num_keys: of the entries with the new tokens, [N].
        newest: slots of the new tokens in the paged cache, [N].
        stale: entries that are loaded whole, with the slots of their tokens.
    """

    width: int
    tokens: Tensor
    num_keys: Tensor
    newest: Tensor
    stale: Mapping[int, Tensor]
    all_slots: Callable[[], Mapping[int, Tensor]]  # of all entries, for a layer that missed a step

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Addends of the scores, [N, 1, 1, K]: 0 for keys that the new token sees, else -inf."""
        key, count = torch.arange(int(self.num_keys.max())), self.num_keys[:, None]
        hidden = key >= count
        if window is not None:
            hidden |= key < count - 1 - window
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None, None]


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """One decoding step of all requests; the same for all layers."""

    number: int
    entries: Sequence[BlockStep]
    all_num_keys: Sequence[int]
    biases: dict[tuple[int | None, torch.dtype], list[Tensor]] = field(default_factory=dict)

    def fits(self, num_keys: Tensor) -> bool:
        """Returns True if the step is that of sequences of these lengths, [B]."""
        return num_keys.tolist() == list(self.all_num_keys)

    def block_biases(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """The addends of each width, made once for all layers with this window."""
        if (window, dtype) not in self.biases:
            self.biases[window, dtype] = [entries.bias(window, dtype) for entries in self.entries]
        return self.biases[window, dtype]


@dataclass
class _LayerBlocks:
    """Entries of one layer: keys [N, Hk, width, D] and values [N, Hk, width, Dv] by width."""

    step: int  # the last one that was appended
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def free(self, widths: Iterable[int]) -> None:
        for width in widths:
            self.keys.pop(width, None)
            self.values.pop(width, None)


class DecodeCache:
    """Entries of the requests that decode, in all layers of a model.

    Only decoding through this cache and `invalidate` may change the keys of a request, which is named by its row in
    SGLang's table of requests.

    Args:
        num_layers: of the model that this process computes.

    Example:
        step = cache.next_step(req_to_token, rows, num_keys)
        for layer in layers:
            cache.attend(query, output, layer.keys, layer.values, step)
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._entries: dict[int, _Entry] = {}  # by row
        self._rows: dict[int, list[int]] = {}  # rows of the entries of a width
        self._layers: dict[int, _LayerBlocks] = {}  # by address of the layer's paged keys
        self._step = 0

    def invalidate(self, rows: Iterable[int]) -> None:
        """Marks requests whose keys were computed by something else than decoding."""
        for row in rows:
            if row in self._entries:
                self._entries[row].is_stale = True

    def has_room(self, num_keys: Sequence[int], bytes_per_token: int) -> bool:
        """Returns True if entries for requests of these lengths fit into `MAX_BYTES`.

        Args:
            bytes_per_token: keys and values of one layer.
        """
        return sum(map(_width, num_keys)) * bytes_per_token * self._num_layers <= MAX_BYTES

    def next_step(self, req_to_token: Tensor, rows: Sequence[int], num_keys: Sequence[int]) -> DecodeStep:
        """Assigns entries; a request that is not among `rows` loses its entry.

        Args:
            req_to_token: cache slots of all requests, [R, T].
            rows: of the batch's requests in `req_to_token`, [B].
            num_keys: tokens of each request with the new one, [B].
        """
        self._step += 1
        present = set(rows)
        for row in [each for each in self._entries if each not in present]:
            self._release(row)
        for row, count in zip(rows, num_keys, strict=True):
            entry = self._entries.get(row)
            if entry is not None and entry.width != _width(count):
                self._release(row)
                entry = None
            if entry is None:
                entry = self._assign(row, _width(count))
            # A entry holds all tokens before the new one, unless the request took another way in between.
            entry.is_stale |= entry.num_keys not in (count - 1, count)
            entry.num_keys = count
        unused = [width for width, entries in self._rows.items() if not entries]
        for layer in self._layers.values():
            layer.free(unused)
        position = {row: i for i, row in enumerate(rows)}
        steps = [
            self._block_step(req_to_token, width, entries, position) for width, entries in self._rows.items() if entries
        ]
        return DecodeStep(number=self._step, entries=steps, all_num_keys=tuple(num_keys))

    def _block_step(
        self, req_to_token: Tensor, width: int, rows: Sequence[int], position: Mapping[int, int]
    ) -> BlockStep:
        entries = [self._entries[row] for row in rows]

        def slots(i: int) -> Tensor:
            return req_to_token[rows[i], : entries[i].num_keys]

        num_keys = torch.tensor([entry.num_keys for entry in entries])
        step = BlockStep(
            width=width,
            tokens=torch.tensor([position[row] for row in rows]),
            num_keys=num_keys,
            newest=req_to_token[torch.tensor(rows), num_keys - 1],
            stale={i: slots(i) for i, entry in enumerate(entries) if entry.is_stale},
            all_slots=lambda: {i: slots(i) for i in range(len(entries))},
        )
        for entry in entries:
            entry.is_stale = False
        return step

    def _assign(self, row: int, width: int) -> _Entry:
        rows = self._rows.setdefault(width, [])
        self._entries[row] = entry = _Entry(width=width, index=len(rows))
        rows.append(row)
        return entry

    def _release(self, row: int) -> None:
        """Frees an entry; the last one of its width moves into the gap and is loaded again."""
        entry = self._entries.pop(row)
        rows = self._rows[entry.width]
        last = rows.pop()
        if last != row:
            rows[entry.index] = last
            self._entries[last].index, self._entries[last].is_stale = entry.index, True

    def attend(
        self,
        query: Tensor,
        output: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        step: DecodeStep,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Attention of one new token of each request over all keys of its request, its own included.

        Args:
            query: [B, H, D] of the new tokens.
            output: [B, H, Dv], is written and returned.
            key_cache, value_cache: of one layer, [S, Hk, D] and [S, Hk, Dv]; H is a multiple of Hk.
            window: earlier keys that a token sees; None: all.
        """
        key_heads = key_cache.shape[1]
        layer = self._layer(key_cache)
        # A layer that missed a step has gaps.
        is_current = layer.step >= step.number - 1
        layer.step = step.number
        for entries, bias in zip(step.entries, step.block_biases(window, query.dtype), strict=True):
            count, longest = len(entries.tokens), bias.shape[-1]
            stale = entries.stale if is_current else entries.all_slots()
            keys = _updated(layer.keys, key_cache, entries, stale, query.dtype)
            values = _updated(layer.values, value_cache, entries, stale, query.dtype)
            # Heads that share keys become queries of one head: [N, Hk, H / Hk, D].
            queries = query.index_select(0, entries.tokens).unflatten(1, (key_heads, -1))
            answers = scaled_dot_product_attention(
                queries, keys[:count, :, :longest], values[:count, :, :longest], attn_mask=bias, scale=scale
            )
            output.index_copy_(0, entries.tokens, answers.flatten(1, 2))
        return output

    def _layer(self, key_cache: Tensor) -> _LayerBlocks:
        address = key_cache.data_ptr()
        if address not in self._layers and len(self._layers) == self._num_layers:
            # SGLang has allocated its cache again.
            self._layers.clear()
        return self._layers.setdefault(address, _LayerBlocks(step=-1))


def _width(num_keys: int) -> int:
    """Width of the entry of a request: the next power of two."""
    return max(MIN_WIDTH, 1 << (num_keys - 1).bit_length())


def _updated(
    stored: dict[int, Tensor], cache: Tensor, entries: BlockStep, stale: Mapping[int, Tensor], dtype: torch.dtype
) -> Tensor:
    """The entries of one width, with the stale ones loaded and the new tokens appended. [>= N, Hk, width, D]"""
    count, (_, heads, size) = len(entries.tokens), cache.shape
    memory = stored.get(entries.width)
    if memory is None or len(memory) < count:
        # Zeros: hidden keys have the weight 0, which hides every value but inf and NaN.
        length = 0 if memory is None else len(memory)
        grown = cache.new_zeros((max(count, 2 * length), heads, entries.width, size), dtype=dtype)
        if memory is not None:
            grown[:length] = memory
        memory = stored[entries.width] = grown
    for i, slots in stale.items():
        memory[i, :, : len(slots)] = cache[slots].transpose(0, 1)
    memory[torch.arange(count), :, entries.num_keys - 1] = cache[entries.newest].to(dtype)
    return memory
