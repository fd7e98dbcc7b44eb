"""Bytes that the forward pass of a Hugging Face decoder keeps for its backward pass, and what the latter adds.

Counted from the operations of transformers' layers, and compared with torch's profiler (benchmarks/memory_model.py).
Shape legend: H hidden width, I width of an MLP, V vocabulary, b bytes of a number of the computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.family import find_family

FLOAT32 = 4

TILE_ELEMENTS = {"cpu": 2**22, "cuda": 2**25}
"""Logits that exist at a time where the output layer works by tiles (training/modules/logprob_head.py)."""
MIN_CHUNKED_VOCABULARY = 4096


class Kernel(StrEnum):
    """How attention is computed."""

    fused = "fused"  # keeps its inputs, its output and a number per head
    matrix = "matrix"  # keeps the scores of every pair of tokens of a sample
    eager = "eager"  # keeps the scores of every pair of tokens of a micro-batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A micro-batch as the trainer computes it."""

    tokens: int
    logit_rows: int  # tokens whose logits are computed
    sample_len: int  # longest sample
    dtype_bytes: int  # of a number of the computation
    kernel: Kernel = Kernel.fused
    device: str = "cpu"
    chunk_tokens: int = 0  # tokens whose logits exist at a time, where the user says so; not above 0: TILE_ELEMENTS
    context_ranks: int = 1  # that share each sample; `tokens` and `logit_rows` are one rank's
    may_join: bool = False  # nothing in the config keeps layers from being two functions

    @property
    def keys_per_token(self) -> float:
        """Keys that attention has for each token, over the tokens of a rank: those of the others, up to its own."""
        return 1.0 if self.context_ranks == 1 else self.context_ranks + 0.5


def is_fused_layer(a: Architecture, layer: int, work: Pass) -> bool:
    """Whether a layer is two functions, which keep less."""
    plain = _is_fused(a) and not a.has_experts(layer) and work.context_ranks == 1
    fits = work.device == "cpu" and work.dtype_bytes == FLOAT32 and work.kernel == Kernel.fused
    return plain and fits and work.may_join


def _is_fused(a: Architecture) -> bool:
    """Whether `training.cpu.fused_layers` computes the layers of this family, which it does without biases only."""
    family = find_family(a.model_type)
    return a.model_type is None or (family.fused_cpu and not family.implied.get("attention_bias", False))


def norm(width: float, b: int) -> float:
    """RMSNorm, a token: its input in float32, the normalised input, the output, and the scale."""
    return (FLOAT32 + 2 * b) * width + FLOAT32


def attention(a: Architecture, work: Pass) -> float:
    """Projections, norms of heads and attention itself, a token."""
    b, heads = work.dtype_bytes, a.num_heads
    if a.is_latent:
        kept = norm(a.kv_rank, b) + (norm(a.q_rank, b) if a.q_rank else 0)
        kept += b * heads * (2 * a.query_width + a.nope_dim + a.value_dim)
    else:
        both = heads + a.num_kv_heads
        kept = b * a.head_dim * (both + a.num_kv_heads)
        if a.qk_norm:
            kept += both * ((FLOAT32 + b) * a.head_dim + FLOAT32)
    kept += b * (work.keys_per_token - 1) * _key_width(a)
    return kept + b * heads * a.value_width + heads * _scores(work)


def _key_width(a: Architecture) -> float:
    """Numbers of a token's keys and values."""
    return a.num_heads * (a.query_width + a.value_dim) if a.is_latent else 2 * a.head_dim * a.num_kv_heads


def _scores(work: Pass) -> float:
    """What attention keeps for each token and head."""
    probabilities = FLOAT32 + (work.dtype_bytes if work.dtype_bytes < FLOAT32 else 0)
    match work.kernel:
        case Kernel.fused:
            return FLOAT32
        case Kernel.matrix:
            return probabilities * work.sample_len
        case Kernel.eager:
            return (probabilities + 1) * work.tokens


def mlp(a: Architecture, layer: int, b: int) -> float:
    """Gate, its activation, up and their product; with experts once for each expert that sees the token."""
    if not a.has_experts(layer):
        return 4 * b * a.intermediate_size
    k = a.experts_per_token
    routed = k * b * (4 * a.expert_size + 2 * a.hidden_size)  # gathered input and output of each expert, too
    shared = 4 * b * a.num_shared_experts * a.expert_size
    return routed + shared + FLOAT32 * a.num_experts + 36 * k  # router, and the order of tokens by expert


def layer_kept(a: Architecture, layer: int, work: Pass) -> float:
    """What one decoder layer keeps for its backward pass."""
    b = work.dtype_bytes
    if is_fused_layer(a, layer, work):
        return work.tokens * _joined_kept(a)
    return work.tokens * (a.num_norms * norm(a.hidden_size, b) + attention(a, work) + mlp(a, layer, b))


def _joined_kept(a: Architecture) -> float:
    """A token: two norms without their inputs, those of heads likewise, attention, and gate, up and activation."""
    numbers = a.num_norms * (2 * a.hidden_size + 1)
    both = a.num_heads + a.num_kv_heads
    numbers += both * (a.head_dim + 1) if a.qk_norm else 0
    numbers += (both + a.num_kv_heads) * a.head_dim + a.num_heads * (a.head_dim + 1)
    return FLOAT32 * (numbers + 3 * a.intermediate_size)


def layer_backward(a: Architecture, layer: int, work: Pass) -> float:
    """What the backward pass of a layer has beside what was kept, at most."""
    b = work.dtype_bytes
    width = 2 * a.intermediate_size
    if a.has_experts(layer):
        width = a.experts_per_token * max(2 * a.hidden_size, 3 * a.expert_size)
    return work.tokens * b * (width + 2 * a.hidden_size)


def layer_input(a: Architecture, work: Pass) -> float:
    """What remains of a layer that is recomputed."""
    return work.tokens * a.hidden_size * work.dtype_bytes


def stem(a: Architecture, work: Pass) -> float:
    """Outside of the layers: rotary tables, the final norm, the rows whose logits are computed, and masks."""
    b, head = work.dtype_bytes, a.rope_dim if a.is_latent else a.head_dim
    stream = 2 * b * a.hidden_size if b < FLOAT32 else 0
    stem = norm(a.hidden_size, b) + 2 * b * head + stream
    if work.context_ranks > 1 and work.device == "cpu":
        stem += b * work.sample_len * work.keys_per_token / (2 * work.context_ranks)
    return work.tokens * stem + work.logit_rows * b * a.hidden_size


def is_chunked(a: Architecture, work: Pass) -> bool:
    """Whether only a tile of the logits exists at a time."""
    is_large = a.vocab_size >= MIN_CHUNKED_VOCABULARY or work.chunk_tokens > 0
    return is_large and (a.model_type is None or find_family(a.model_type).chunked_logits)


def head_forward(a: Architecture, work: Pass) -> float:
    """Logits, their logarithms and the entropy; or a tile of them."""
    b, rows, vocabulary = work.dtype_bytes, work.logit_rows, a.vocab_size
    if not is_chunked(a, work):
        return rows * vocabulary * (b + 3 * FLOAT32)
    return _tile(a, work) * 2 * FLOAT32  # scaled logits and their exponentials


def head_backward(a: Architecture, work: Pass) -> float:
    """Gradients of logits, of the rows and of the output layer."""
    b, rows, vocabulary = work.dtype_bytes, work.logit_rows, a.vocab_size
    table = vocabulary * a.hidden_size
    cast = b if b < FLOAT32 else 0
    if not is_chunked(a, work):
        return rows * vocabulary * (3 * FLOAT32 + cast) + b * table
    tile = _tile(a, work) * (2 * FLOAT32 + cast)
    of_rows = rows * a.hidden_size * (FLOAT32 + b)  # the sum over tiles, and what one adds
    return tile + b * table + of_rows


def _tile(a: Architecture, work: Pass) -> int:
    """Logits that exist at a time where they are made by tiles."""
    tokens = work.chunk_tokens if work.chunk_tokens > 0 else max(1, TILE_ELEMENTS[work.device] // a.vocab_size)
    return min(work.logit_rows, tokens) * a.vocab_size
