"""Group `model`: which weights and which architecture."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rlscale.config.group import ConfigGroup


class ModelBuild(StrEnum):
    """Models that can be made on the spot."""

    tiny_qwen3 = "tiny_qwen3"


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
            description="Hugging Face folder of the reference model of the KL terms. None: the model that "
            "the run starts from. Unused without `algo.use_kl_loss`.",
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
