"""Bytes of activations that a Hugging Face decoder saves for its backward pass, and that this pass adds.

Counted from the operations of transformers' layers and compared with torch's profiler (benchmarks/memory_model.py).
Shape legend: H hidden width, I width of an MLP, V vocabulary, b bytes of an element of the computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlscale.architectures.architecture import Architecture
from rlscale.architectures.family import find_family
from rlscale.architectures.tower_shape import TowerShape

FLOAT32 = 4

TILE_ELEMENTS = {"cpu": 2**22, "cuda": 2**25}
"""Logits in memory at a time if the output layer works in chunks (training/modules/logprob_head.py)."""
MIN_CHUNKED_VOCABULARY = 4096


class AttentionKernel(StrEnum):
    """Implementation of attention, by what it saves for the backward pass."""

    fused = "fused"  # inputs, output and one number per token and head
    matrix = "matrix"  # the scores of every pair of tokens of a sample
    eager = "eager"  # the scores of every pair of tokens of a micro-batch


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchSpec:
    """A micro-batch and the implementation that computes it."""

    tokens: int
    logit_rows: int  # tokens whose logits are computed
    sample_len: int  # longest sample
    dtype_bytes: int  # of an element of the computation
    kernel: AttentionKernel = AttentionKernel.fused
    device: str = "cpu"
    chunk_tokens: int = 0  # `train.log_probs_chunk_size`: tokens per chunk of logits; not above 0: by TILE_ELEMENTS
    context_ranks: int = 1  # context-parallel size; `tokens` and `logit_rows` are those of one rank
    image_tokens: int = 0  # of different images, at most
    may_fuse: bool = False  # the config allows the fused layers of `training.cpu`

    @property
    def keys_per_token(self) -> float:
        """Keys in attention per token of a rank, including those that it receives from other context ranks."""
        return 1.0 if self.context_ranks == 1 else self.context_ranks + 0.5


def is_fused_layer(a: Architecture, layer: int, work: MicrobatchSpec) -> bool:
    """Whether `training.cpu.fused_layers` computes a layer. Its layers save less."""
    is_plain = _has_fused_layers(a) and not a.has_experts(layer) and work.context_ranks == 1
    fits = work.device == "cpu" and work.dtype_bytes == FLOAT32 and work.kernel == AttentionKernel.fused
    return is_plain and fits and work.may_fuse


def _has_fused_layers(a: Architecture) -> bool:
    """Whether the family has fused layers, which need linear layers without bias. No family: a tiny model."""
    family = find_family(a.model_type)
    return a.model_type is None or (family.fused_cpu and not family.implied.get("attention_bias", False))


def norm_bytes(width: float, b: int) -> float:
    """RMSNorm of a token: its input in float32, the normalised input, the output, and the scale."""
    return (FLOAT32 + 2 * b) * width + FLOAT32


def attention_bytes(a: Architecture, work: MicrobatchSpec) -> float:
    """Projections, norms of heads and attention itself, of a token."""
    b, heads = work.dtype_bytes, a.num_heads
    if a.is_latent:
        saved = norm_bytes(a.kv_rank, b) + (norm_bytes(a.q_rank, b) if a.q_rank else 0)
        saved += b * heads * (2 * a.query_width + a.nope_dim + a.value_dim)
    else:
        query_and_key_heads = heads + a.num_kv_heads
        saved = b * a.head_dim * (query_and_key_heads + a.num_kv_heads)
        if a.qk_norm:
            saved += query_and_key_heads * ((FLOAT32 + b) * a.head_dim + FLOAT32)
    # Keys and values received from other context-parallel ranks.
    saved += b * (work.keys_per_token - 1) * _key_value_width(a)
    return saved + b * heads * a.value_width + heads * _score_bytes(work)


def _key_value_width(a: Architecture) -> float:
    """Elements of a token's keys and values."""
    return a.num_heads * (a.query_width + a.value_dim) if a.is_latent else 2 * a.head_dim * a.num_kv_heads


def _score_bytes(work: MicrobatchSpec) -> float:
    """Bytes that attention saves per token and head."""
    # The softmax is computed in float32; a copy in the dtype of the computation is saved as well.
    probabilities = FLOAT32 + (work.dtype_bytes if work.dtype_bytes < FLOAT32 else 0)
    match work.kernel:
        case AttentionKernel.fused:
            return FLOAT32
        case AttentionKernel.matrix:
            return probabilities * work.sample_len
        case AttentionKernel.eager:
            return (probabilities + 1) * work.tokens


def mlp_bytes(a: Architecture, layer: int, b: int) -> float:
    """Gate, its activation, up projection and their product, of a token; with experts once per chosen expert."""
    if not a.has_experts(layer):
        return 4 * b * a.intermediate_size
    k = a.experts_per_token
    routed = k * b * (4 * a.expert_size + 2 * a.hidden_size)  # including gathered input and output of each expert
    shared = 4 * b * a.shared_size
    return routed + shared + FLOAT32 * a.num_experts + 36 * k  # router, and indices that sort tokens by expert


def layer_saved_bytes(a: Architecture, layer: int, work: MicrobatchSpec) -> float:
    """Bytes that one decoder layer saves for its backward pass."""
    b = work.dtype_bytes
    if is_fused_layer(a, layer, work):
        return work.tokens * _fused_saved_bytes(a)
    per_token = a.num_norms * norm_bytes(a.hidden_size, b) + attention_bytes(a, work) + mlp_bytes(a, layer, b)
    return work.tokens * per_token


def _fused_saved_bytes(a: Architecture) -> float:
    """Bytes per token of a fused layer: norms without their inputs, attention, and gate, up and activation."""
    elements = a.num_norms * (2 * a.hidden_size + 1)
    query_and_key_heads = a.num_heads + a.num_kv_heads
    elements += query_and_key_heads * (a.head_dim + 1) if a.qk_norm else 0
    elements += (query_and_key_heads + a.num_kv_heads) * a.head_dim + a.num_heads * (a.head_dim + 1)
    return FLOAT32 * (elements + 3 * a.intermediate_size)


def layer_backward_bytes(a: Architecture, layer: int, work: MicrobatchSpec) -> float:
    """Peak bytes of the backward pass of a layer in addition to its saved activations."""
    b = work.dtype_bytes
    width = 2 * a.intermediate_size
    if a.has_experts(layer):
        width = a.experts_per_token * max(2 * a.hidden_size, 3 * a.expert_size)
    return work.tokens * b * (width + 2 * a.hidden_size)


def layer_input_bytes(a: Architecture, work: MicrobatchSpec) -> float:
    """Bytes that a recomputed layer saves: its input."""
    return work.tokens * a.hidden_size * work.dtype_bytes


def stem_bytes(a: Architecture, work: MicrobatchSpec) -> float:
    """Bytes outside of the layers: rotary tables, the final norm, the rows whose logits are computed, and masks."""
    b, head = work.dtype_bytes, a.rope_dim if a.is_latent else a.head_dim
    stream = 2 * b * a.hidden_size if b < FLOAT32 else 0
    per_token = norm_bytes(a.hidden_size, b) + 2 * b * head + stream
    if work.context_ranks > 1 and work.device == "cpu":
        per_token += b * work.sample_len * work.keys_per_token / (2 * work.context_ranks)
    return work.tokens * per_token + work.logit_rows * b * a.hidden_size


def tower_saved_bytes(tower: TowerShape, blocks: int, work: MicrobatchSpec, recompute: bool) -> float:
    """Bytes that the last blocks of a vision tower and its projectors save for their backward pass."""
    b, h, width = work.dtype_bytes, tower.hidden_size, tower.intermediate_size
    # Inputs and outputs of two norms, queries, keys, values and output of attention, and the MLP.
    plain, gated = b * (8 * h + 2 * width), 2 * norm_bytes(h, b) + b * (4 * h + 4 * width)
    block = gated if tower.is_gated else plain
    # Merged patches before and after the first layer of each projector.
    projectors = 3 * b * h * (1 + tower.num_deepstack)
    patches = work.image_tokens * tower.merge_size**2
    return patches * (blocks * (b * h if recompute else block) + projectors * (blocks > 0))


def tower_backward_bytes(tower: TowerShape, work: MicrobatchSpec) -> float:
    """Peak bytes of the backward pass of a block in addition to its saved activations."""
    patches = work.image_tokens * tower.merge_size**2
    return patches * work.dtype_bytes * (2 * tower.intermediate_size + 2 * tower.hidden_size)


def is_chunked(a: Architecture, work: MicrobatchSpec) -> bool:
    """Whether the output layer computes logits in chunks."""
    is_large = a.vocab_size >= MIN_CHUNKED_VOCABULARY or work.chunk_tokens > 0
    return is_large and (a.model_type is None or find_family(a.model_type).chunked_logits)


def head_forward_bytes(a: Architecture, work: MicrobatchSpec) -> float:
    """Bytes of logits, their logprobs and the entropy, or of one chunk of them."""
    b, rows, vocabulary = work.dtype_bytes, work.logit_rows, a.vocab_size
    if not is_chunked(a, work):
        return rows * vocabulary * (b + 3 * FLOAT32)
    return chunk_elements(a, work) * 2 * FLOAT32  # scaled logits and their exponentials


def head_backward_bytes(a: Architecture, work: MicrobatchSpec) -> float:
    """Bytes of the gradients of logits, of the rows and of the output layer."""
    b, rows, vocabulary = work.dtype_bytes, work.logit_rows, a.vocab_size
    table = vocabulary * a.hidden_size
    cast = b if b < FLOAT32 else 0
    if not is_chunked(a, work):
        return rows * vocabulary * (3 * FLOAT32 + cast) + b * table
    chunk = chunk_elements(a, work) * (2 * FLOAT32 + cast)
    of_rows = rows * a.hidden_size * (FLOAT32 + b)  # the sum over chunks, and the term of one chunk
    return chunk + b * table + of_rows


def chunk_elements(a: Architecture, work: MicrobatchSpec) -> int:
    """Logits of one chunk."""
    tokens = work.chunk_tokens if work.chunk_tokens > 0 else default_chunk(a, work)
    return min(work.logit_rows, tokens) * a.vocab_size


def default_chunk(a: Architecture, work: MicrobatchSpec) -> int:
    """Tokens whose logits exist at a time where the config sets no number."""
    return max(1, TILE_ELEMENTS[work.device] // a.vocab_size)
