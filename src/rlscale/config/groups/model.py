"""Group `model`: which weights and which architecture."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup
from rlscale.config.groups.patterns import DOTTED_PATH


class ModelBuild(StrEnum):
    """Models that can be made on the spot."""

    tiny_qwen3 = "tiny_qwen3"
    tiny_qwen3_moe = "tiny_qwen3_moe"
    tiny_deepseek_v3 = "tiny_deepseek_v3"


class MegatronToHf(StrEnum):
    """Converters between the names of Megatron-core and of Hugging Face."""

    raw = "raw"
    bridge = "bridge"


_FIGURE = (
    "None: taken from the checkpoint's `config.json`. With `model.build` it shapes the model, else it is compared."
)


@dataclass(kw_only=True)
class ModelConfig(ConfigGroup):
    """The policy, its reference and their architecture."""

    hf_checkpoint: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Hugging Face folder or hub id that gives tokenizer, architecture and first weights. "
            "None: `model.build` must be set.",
        ),
    ] = None
    ref_load: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Hugging Face folder of the reference model of the KL terms, or a folder of checkpoints of a "
            "policy like this one. None: the model that the run starts from. Unused without `algo.use_kl_loss` or "
            "`algo.kl_coef`.",
        ),
    ] = None
    build: Annotated[
        ModelBuild | None,
        Field(
            description="Make this model on the spot, with random weights and a character tokenizer, and cache it. "
            "None: load `model.hf_checkpoint`."
        ),
    ] = None
    init_seed: Annotated[int, Field(ge=0, description="Seed of the random weights of `model.build`.")] = 0
    cache_dir: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Folder for built and warmed-up models. None: `$RLSCALE_CACHE`, else `~/.cache/rlscale`.",
        ),
    ] = None
    warmup_experiment: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Experiment that is run first, once, and whose final Hugging Face export this run starts "
            "from; cached by a hash of its resolved config. None: no warm-up.",
        ),
    ] = None
    num_layers: Annotated[int | None, Field(gt=0, description=f"Transformer layers. {_FIGURE}")] = None
    hidden_size: Annotated[int | None, Field(gt=0, description=f"Width of the residual stream. {_FIGURE}")] = None
    intermediate_size: Annotated[int | None, Field(gt=0, description=f"Width inside the MLP. {_FIGURE}")] = None
    num_attention_heads: Annotated[int | None, Field(gt=0, description=f"Query heads. {_FIGURE}")] = None
    num_key_value_heads: Annotated[int | None, Field(gt=0, description=f"Key/value heads. {_FIGURE}")] = None
    head_dim: Annotated[int | None, Field(gt=0, description=f"Width of one attention head. {_FIGURE}")] = None
    vocab_size: Annotated[int | None, Field(gt=0, description=f"Rows of the embedding, in tokens. {_FIGURE}")] = None
    max_position_embeddings: Annotated[
        int | None, Field(gt=0, description=f"Longest sequence the model takes, in tokens. {_FIGURE}")
    ] = None
    tie_word_embeddings: Annotated[
        bool | None, Field(description=f"Whether the output layer shares the embedding's weights. {_FIGURE}")
    ] = None
    rotary_base: Annotated[int | None, Field(gt=0, description=f"RoPE theta. {_FIGURE}")] = None
    model_type: Annotated[
        str | None, Field(min_length=1, description=f"Family, as transformers names it, e.g. `qwen3_moe`. {_FIGURE}")
    ] = None
    attention_bias: Annotated[
        bool | None, Field(description=f"Whether the query, key and value projections have a bias. {_FIGURE}")
    ] = None
    use_qk_norm: Annotated[
        bool | None, Field(description=f"Whether the queries and keys of each head are normalised. {_FIGURE}")
    ] = None
    num_experts: Annotated[
        int | None, Field(gt=0, description=f"Routed experts of a layer. No layer has any without it. {_FIGURE}")
    ] = None
    num_experts_per_tok: Annotated[
        int | None, Field(gt=0, description=f"Routed experts that see each token. {_FIGURE}")
    ] = None
    moe_intermediate_size: Annotated[int | None, Field(gt=0, description=f"Width inside one expert. {_FIGURE}")] = None
    num_shared_experts: Annotated[
        int | None, Field(ge=0, description=f"Experts that see every token, each as wide as a routed one. {_FIGURE}")
    ] = None
    first_k_dense_replace: Annotated[
        int | None, Field(ge=0, description=f"First layers that have a dense MLP instead of experts. {_FIGURE}")
    ] = None
    norm_topk_prob: Annotated[
        bool | None, Field(description=f"Whether the weights of the chosen experts sum to one. {_FIGURE}")
    ] = None
    n_group: Annotated[
        int | None, Field(gt=0, description=f"Groups that the experts of a layer are divided into. {_FIGURE}")
    ] = None
    topk_group: Annotated[
        int | None, Field(gt=0, description=f"Groups from which a token may choose experts. {_FIGURE}")
    ] = None
    routed_scaling_factor: Annotated[
        float | None, Field(gt=0, description=f"Factor on what the routed experts add. {_FIGURE}")
    ] = None
    q_lora_rank: Annotated[
        int | None, Field(gt=0, description=f"Rank of the compressed queries of latent attention. {_FIGURE}")
    ] = None
    kv_lora_rank: Annotated[
        int | None,
        Field(
            gt=0,
            description="Rank of the compressed keys and values. Latent attention (MLA) is what a model with this has. "
            + _FIGURE,
        ),
    ] = None
    qk_nope_head_dim: Annotated[
        int | None, Field(gt=0, description=f"Width of a head of latent attention without position. {_FIGURE}")
    ] = None
    qk_rope_head_dim: Annotated[
        int | None, Field(gt=0, description=f"Width of a head of latent attention that turns with position. {_FIGURE}")
    ] = None
    v_head_dim: Annotated[
        int | None, Field(gt=0, description=f"Width of a value head of latent attention. {_FIGURE}")
    ] = None
    num_nextn_predict_layers: Annotated[
        int | None,
        Field(
            ge=0,
            description=f"Layers that predict further tokens, which training leaves out of the model. {_FIGURE}",
        ),
    ] = None
    padded_vocab_size: Annotated[
        int | None,
        Field(
            gt=0,
            description="Rows of the embedding in the trainer, which may have to be a multiple of the tensor-parallel "
            "size, in tokens. None: the smallest that is.",
        ),
    ] = None
    ref_ckpt_step: Annotated[
        int | None,
        Field(ge=0, description="Rollout whose checkpoint in `model.ref_load` is the reference. None: the newest."),
    ] = None
    teacher_load: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Hugging Face folder or hub id of the teacher of `algo.opd_kl_coef`, with the policy's tokens; "
            "or a folder of checkpoints of a policy like this one, of which the newest is taken. None: no teacher.",
        ),
    ] = None
    name: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Model family whose weight names are converted between Megatron-core and Hugging Face. None: "
            "by the checkpoint's `config.json`.",
        ),
    ] = None
    megatron_to_hf_mode: Annotated[
        MegatronToHf,
        Field(
            description="Converter of weights for Megatron-core. `raw`: rlscale's own. `bridge`: mbridge, an extra of "
            "that name."
        ),
    ] = MegatronToHf.raw
    custom_model_provider_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own function, `package.module:name`, that makes the Megatron-core model. None: made "
            "from the architecture.",
        ),
    ] = None
    use_hf_config_for_megatron: Annotated[
        bool,
        Field(
            description="Take Megatron-core's architecture from the checkpoint's `config.json` wherever `megatron` "
            "leaves it open."
        ),
    ] = False
