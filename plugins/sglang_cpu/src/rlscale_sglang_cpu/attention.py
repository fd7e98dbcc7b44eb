"""Attention of a batch of sequences with one call of torch instead of one for each sequence.

SGLang's `torch_native` backend computes attention sequence by sequence. For the small batches of work that a CPU gets
in decoding, most of that time is spent on the calls. Here sequences of similar length are padded to the longest of
them, so that their cached keys and values are gathered, and their attention is computed, in a few calls.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MAX_PADDING = 2  # the longest sequence of a bucket is at most this many times as long as the shortest
MAX_KEYS = 2**15  # of a bucket, with padding: bounds the copies of cached keys and values
MAX_SCORES = 2**24  # of a bucket and attention head, with padding: bounds its mask


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """N sequences of similar length, padded to Q new tokens and K keys.

    Attributes:
        slots: of the keys in the cache, [N, K]; padding repeats slot 0.
        tokens: indices of the new tokens in the batch, [N, Q]; padding repeats the last one of its sequence.
        filled: indices of the entries of `tokens` that are not padding; None: all are filled.
        positions: of the new tokens in their sequences, [N, Q].
        num_keys: without padding, [N, 1].
    """

    slots: Tensor
    tokens: Tensor
    filled: Tensor | None
    positions: Tensor
    num_keys: Tensor

    def bias(self, window: int | None, shared: int, dtype: torch.dtype) -> Tensor:
        """Addends of the scores, [N, 1, shared * Q or 1, K]: 0 for keys that a token sees, else -inf.

        Args:
            window: earlier keys that a token sees; None: all.
            shared: attention heads that share the keys of one head.
        """
        key = torch.arange(self.slots.shape[1])
        position = self.positions[:, :, None]
        hidden = (key > position) | (key >= self.num_keys[:, :, None])
        if window is not None:
            hidden |= key < position - window
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        # One new token: the same row for each of the heads.
        return bias[:, None] if bias.shape[1] == 1 else bias.repeat(1, shared, 1)[:, None]


class Plan:
    """How the sequences of one forward pass are batched; the same for all layers.

    Args:
        req_to_token: cache slots of all requests, [R, T].
        rows: of the batch's sequences in `req_to_token`, [B].
        num_new: new tokens of each sequence, which come last in it, [B].
        num_keys: tokens of each sequence with the new ones, [B].
        heads_per_key: attention heads that share one head of keys.
    """

    def __init__(
        self, req_to_token: Tensor, rows: Tensor, num_new: Sequence[int], num_keys: Sequence[int], heads_per_key: int
    ) -> None:
        self._num_keys = list(num_keys)
        self._heads_per_key = heads_per_key
        self._biases: dict[tuple[int | None, torch.dtype], list[Tensor]] = {}
        starts = [0]
        for count in num_new:
            starts.append(starts[-1] + count)
        self.buckets = [
            _bucket(
                req_to_token[rows[torch.tensor(members)]],
                [starts[i] for i in members],
                [num_new[i] for i in members],
                [num_keys[i] for i in members],
            )
            for members in group_similar(num_new, num_keys, heads_per_key)
        ]

    def fits(self, num_keys: Tensor) -> bool:
        """Returns True if the plan is for sequences of these lengths, [B]."""
        return num_keys.tolist() == self._num_keys

    def biases(self, window: int | None, dtype: torch.dtype) -> list[Tensor]:
        """The addends of the buckets' scores, made once for all layers with this window."""
        if (window, dtype) not in self._biases:
            biases = [bucket.bias(window, self._heads_per_key, dtype) for bucket in self.buckets]
            self._biases[window, dtype] = biases
        return self._biases[window, dtype]


def group_similar(num_new: Sequence[int], num_keys: Sequence[int], heads_per_key: int) -> Iterator[list[int]]:
    """Indices of sequences whose lengths differ little enough to be padded, in groups."""
    order = sorted(range(len(num_keys)), key=lambda i: (num_new[i], num_keys[i]), reverse=True)
    members: list[int] = []
    for i in order:
        together = [*members, i]
        queries, keys = num_new[together[0]], [num_keys[m] for m in together]
        fits = (
            queries <= MAX_PADDING * num_new[i]
            and max(keys) <= MAX_PADDING * min(keys)
            and len(together) * max(keys) <= MAX_KEYS
            and len(together) * max(keys) * queries * heads_per_key <= MAX_SCORES
        )
        if members and not fits:
            yield members
            together = [i]
        members = together
    if members:
        yield members


def _bucket(req_to_token: Tensor, starts: Sequence[int], num_new: Sequence[int], num_keys: Sequence[int]) -> Bucket:
    queries, keys = max(num_new), max(num_keys)
    start, count, total = (torch.tensor(values)[:, None] for values in (starts, num_new, num_keys))
    query, key = torch.arange(queries), torch.arange(keys)
    offset = torch.minimum(query, count - 1)
    return Bucket(
        slots=torch.where(key < total, req_to_token[:, :keys], 0),
        tokens=start + offset,
        filled=None if min(num_new) == queries else (query < count).flatten().nonzero().flatten(),
        positions=total - count + offset,
        num_keys=total,
    )


class Workspace:
    """Memory for gathered keys and values, which all layers and steps use again.

    New memory for each call would cost several times the copy: the system clears its pages first.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def gather(self, name: str, cache: Tensor, slots: Tensor) -> Tensor:
        """`cache[slots]`, [len(slots), ...]; valid until the next call with this name."""
        shape = (len(slots), *cache.shape[1:])
        size = math.prod(shape)
        memory = self._memory.get((name, cache.dtype))
        if memory is None or memory.numel() < size:
            memory = self._memory[name, cache.dtype] = cache.new_empty(size)
        return torch.index_select(cache, 0, slots, out=memory[:size].view(shape))


def attend(
    query: Tensor,
    output: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: Plan,
    workspace: Workspace,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of the new tokens over the cached keys of their sequences, theirs included.

    Args:
        query: [T, H, D] of the new tokens, sequence by sequence.
        output: [T, H, Dv], is written and returned.
        key_cache, value_cache: [S, Hk, D] and [S, Hk, Dv]; H is a multiple of Hk.
        window: earlier keys that a token sees; None: all.
    """
    num_heads, key_heads = query.shape[1], key_cache.shape[1]
    for bucket, bias in zip(plan.buckets, plan.biases(window, query.dtype), strict=True):
        (n, num_keys), num_queries = bucket.slots.shape, bucket.tokens.shape[1]
        slots, tokens = bucket.slots.view(-1), bucket.tokens.view(-1)
        keys = workspace.gather("keys", key_cache, slots).view(n, num_keys, key_heads, -1).to(query.dtype)
        values = workspace.gather("values", value_cache, slots).view(n, num_keys, key_heads, -1).to(query.dtype)
        queries = query.index_select(0, tokens).view(n, num_queries, key_heads, num_heads // key_heads, -1)
        # Heads that share keys become further queries of one head, so that no key is copied for them.
        queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)
        answers = scaled_dot_product_attention(
            queries, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=bias, scale=scale
        )
        answers = answers.unflatten(2, (-1, num_queries)).permute(0, 3, 1, 2, 4).reshape(len(tokens), num_heads, -1)
        if bucket.filled is not None:
            tokens, answers = tokens[bucket.filled], answers[bucket.filled]
        output.index_copy_(0, tokens, answers)
    return output
