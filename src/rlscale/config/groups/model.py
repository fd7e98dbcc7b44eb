"""Group `model`: weights and architecture."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import DOTTED_PATH, ConfigGroup


class ModelBuild(StrEnum):
    """Small models that are built with random weights."""

    tiny_qwen3 = "tiny_qwen3"
    tiny_qwen3_agent = "tiny_qwen3_agent"
    tiny_qwen3_moe = "tiny_qwen3_moe"
    tiny_qwen2_5_vl = "tiny_qwen2_5_vl"
    tiny_qwen3_vl = "tiny_qwen3_vl"
    tiny_deepseek_v3 = "tiny_deepseek_v3"


class MegatronToHf(StrEnum):
    """Weight converters between Megatron-core and Hugging Face."""

    raw = "raw"
    bridge = "bridge"


@dataclass(kw_only=True)
class ModelConfig(ConfigGroup):
    """Weights of policy, reference and teacher, and their architecture."""

    # Sources of weights.
    hf_checkpoint: Annotated[str | None, Field(min_length=1)] = None
    """Hugging Face folder or hub id of the tokenizer, the architecture and the initial weights. None: `model.build`
    must be set.
    """

    ref_load: Annotated[str | None, Field(min_length=1)] = None
    """Reference model of the KL terms: a Hugging Face folder, or a checkpoint folder of a policy of the same
    architecture. None: the model that the run starts from. No effect without `algo.use_kl_loss` or `algo.kl_coef`.
    """

    build: ModelBuild | None = None
    """Build this small model with random weights and a character tokenizer, and cache it. None: load
    `model.hf_checkpoint`.
    """

    init_seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the random weights of `model.build`. No effect without `model.build`."""

    cache_dir: Annotated[str | None, Field(min_length=1)] = None
    """Cache folder for the models of `model.build` and `model.warmup_experiment`. None: `$RLSCALE_CACHE`, else
    `~/.cache/rlscale`.
    """

    warmup_experiment: Annotated[str | None, Field(min_length=1)] = None
    """Experiment to run once before this run, which then starts from its final Hugging Face export. The export is
    cached by a hash of the resolved config of the experiment and of its data files. None: no warm-up.
    """

    # Architecture, by the names of keys in `config.json` or slime.
    num_layers: Annotated[int | None, Field(gt=0)] = None
    """Number of transformer layers. None: from `config.json`, which a value set here must match. With `model.build` it
    sets the shape.
    """

    hidden_size: Annotated[int | None, Field(gt=0)] = None
    """Width of the residual stream. None: from `config.json`, which a value set here must match. With `model.build` it
    sets the shape.
    """

    intermediate_size: Annotated[int | None, Field(gt=0)] = None
    """Intermediate width of the MLP. None: from `config.json`, which a value set here must match. With `model.build` it
    sets the shape.
    """

    num_attention_heads: Annotated[int | None, Field(gt=0)] = None
    """Number of query heads. None: from `config.json`, which a value set here must match. With `model.build` it sets
    the shape.
    """

    num_key_value_heads: Annotated[int | None, Field(gt=0)] = None
    """Number of key/value heads. None: from `config.json`, which a value set here must match. With `model.build` it
    sets the shape.
    """

    head_dim: Annotated[int | None, Field(gt=0)] = None
    """Width of one attention head. None: from `config.json`, which a value set here must match. With `model.build` it
    sets the shape.
    """

    vocab_size: Annotated[int | None, Field(gt=0)] = None
    """Number of rows of the embedding, in tokens. None: from `config.json`, which a value set here must match. With
    `model.build` it sets the shape.
    """

    max_position_embeddings: Annotated[int | None, Field(gt=0)] = None
    """Maximum sequence length of the model, in tokens. None: from `config.json`, which a value set here must match.
    With `model.build` it sets the shape.
    """

    tie_word_embeddings: bool | None = None
    """Whether embedding and output layer share their weights. None: from `config.json`, which a value set here must
    match. With `model.build` it sets the shape.
    """

    rotary_base: Annotated[int | None, Field(gt=0)] = None
    """Base of the rotary embedding (`rope_theta`). None: from `config.json`, which a value set here must match. With
    `model.build` it sets the shape.
    """

    model_type: Annotated[str | None, Field(min_length=1)] = None
    """Model family by its name in transformers, e.g. `qwen3_moe`. None: from `config.json`, which a value set here must
    match. With `model.build` it sets the shape.
    """

    attention_bias: bool | None = None
    """Whether the query, key and value projections have a bias. None: from `config.json`, which a value set here must
    match. With `model.build` it sets the shape.
    """

    use_qk_norm: bool | None = None
    """Whether queries and keys are normalised per head. None: from `config.json`, which a value set here must match.
    With `model.build` it sets the shape.
    """

    # Mixture of experts.
    num_experts: Annotated[int | None, Field(gt=0)] = None
    """Number of routed experts per layer. If `config.json` has none either, the model is dense. None: from
    `config.json`, which a value set here must match. With `model.build` it sets the shape.
    """

    num_experts_per_tok: Annotated[int | None, Field(gt=0)] = None
    """Number of routed experts per token. None: from `config.json`, which a value set here must match. With
    `model.build` it sets the shape.
    """

    moe_intermediate_size: Annotated[int | None, Field(gt=0)] = None
    """Intermediate width of one expert. None: from `config.json`, which a value set here must match. With `model.build`
    it sets the shape.
    """

    num_shared_experts: Annotated[int | None, Field(ge=0)] = None
    """Number of shared experts, each with the width of a routed expert. None: from `config.json`, which a value set
    here must match. With `model.build` it sets the shape.
    """

    first_k_dense_replace: Annotated[int | None, Field(ge=0)] = None
    """Number of leading layers with a dense MLP instead of experts. None: from `config.json`, which a value set here
    must match. With `model.build` it sets the shape.
    """

    norm_topk_prob: bool | None = None
    """Whether the router weights of the selected experts are normalised to sum to 1. None: from `config.json`, which a
    value set here must match. With `model.build` it sets the shape.
    """

    n_group: Annotated[int | None, Field(gt=0)] = None
    """Number of groups that the experts of a layer are divided into. None: from `config.json`, which a value set here
    must match. With `model.build` it sets the shape.
    """

    topk_group: Annotated[int | None, Field(gt=0)] = None
    """Number of expert groups that a token can be routed to. None: from `config.json`, which a value set here must
    match. With `model.build` it sets the shape.
    """

    routed_scaling_factor: Annotated[float | None, Field(gt=0)] = None
    """Scaling factor of the output of the routed experts. None: from `config.json`, which a value set here must match.
    With `model.build` it sets the shape.
    """

    # Multi-head latent attention (MLA).
    q_lora_rank: Annotated[int | None, Field(gt=0)] = None
    """Rank of the compressed queries of multi-head latent attention (MLA). None: from `config.json`, which a value set
    here must match. With `model.build` it sets the shape.
    """

    kv_lora_rank: Annotated[int | None, Field(gt=0)] = None
    """Rank of the compressed keys and values of MLA. A model that has it uses MLA. None: from `config.json`, which a
    value set here must match. With `model.build` it sets the shape.
    """

    qk_nope_head_dim: Annotated[int | None, Field(gt=0)] = None
    """Width of the part of an MLA head without rotary embedding. None: from `config.json`, which a value set here must
    match. With `model.build` it sets the shape.
    """

    qk_rope_head_dim: Annotated[int | None, Field(gt=0)] = None
    """Width of the part of an MLA head with rotary embedding. None: from `config.json`, which a value set here must
    match. With `model.build` it sets the shape.
    """

    v_head_dim: Annotated[int | None, Field(gt=0)] = None
    """Width of one value head of MLA. None: from `config.json`, which a value set here must match. With `model.build`
    it sets the shape.
    """

    # Further layers and the padded embedding.
    num_nextn_predict_layers: Annotated[int | None, Field(ge=0)] = None
    """Number of layers for multi-token prediction. Training skips them unless `megatron.mtp_num_layers` is set. None:
    from `config.json`, which a value set here must match. With `model.build` it sets the shape.
    """

    padded_vocab_size: Annotated[int | None, Field(gt=0)] = None
    """Number of rows of the embedding in the Megatron-core trainer, in tokens; must be a multiple of
    `megatron.tensor_model_parallel_size`. None: the smallest such multiple.
    """

    # Reference and teacher.
    ref_ckpt_step: Annotated[int | None, Field(ge=0)] = None
    """Rollout number of the checkpoint in `model.ref_load` to use as reference. None: the newest checkpoint."""

    teacher_load: Annotated[str | None, Field(min_length=1)] = None
    """Teacher of `algo.opd_kl_coef`, which must have the same vocabulary as the policy: a Hugging Face folder or hub
    id, or a checkpoint folder of a policy of the same architecture (its newest checkpoint is used). None: no teacher
    in the trainer.
    """

    teacher_url: Annotated[str | None, Field(min_length=1)] = None
    """Server with the teacher of `algo.opd_kl_coef`, `http://<host>:<port>`: `rlscale-serve`, or SGLang. It returns the
    logprobs of the tokens of each sample (`--opd-type sglang` of slime). Its tokenizer must be that of the policy. A
    key of the server is in the variable RLSCALE_TEACHER_API_KEY. None: `model.teacher_load` is the teacher, or
    `data.teacher_by_source` names several.
    """

    # Megatron-core.
    name: Annotated[str | None, Field(min_length=1)] = None
    """Model family whose weight names are mapped between Megatron-core and Hugging Face. None: the one in
    `config.json`.
    """

    megatron_to_hf_mode: MegatronToHf = MegatronToHf.raw
    """Weight converter of the Megatron-core backend. `raw`: the mappings of rlscale. `bridge`: mbridge; needs the extra
    `rlscale[bridge]`.
    """

    custom_model_provider_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that builds the Megatron-core model. None: the model is built from the
    architecture.
    """

    use_hf_config_for_megatron: bool = False
    """Read the architecture fields of Megatron-core that `megatron` does not set from `config.json`."""
