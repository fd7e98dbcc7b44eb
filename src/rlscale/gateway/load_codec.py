"""The renderer of a model's folder, for the gateway and for an engine with chat APIs."""

from typing import cast

from rlscale.architectures.hf_config import read_hf_fields
from rlscale.data.length_filter import max_chars_per_token
from rlscale.gateway.codec import Codec
from rlscale.models.hf_models import load_tokenizer
from rlscale.renderers.answer_parser import Tokenizer
from rlscale.renderers.families import make_renderer
from rlscale.renderers.run_images import RunImages


def load_codec(model_path: str, renderer: str = "auto", *, reads_images: bool = False) -> Codec:
    """Loads the tokenizer of a model and makes its renderer.

    Args:
        model_path: folder in Hugging Face format, or a hub id.
        renderer: see `make_renderer`.
        reads_images: messages may have images.

    Raises:
        ConfigError: the model has no tokenizer, or no image processor.
        RenderError: no renderer fits it.
    """
    tokenizer = load_tokenizer(model_path)
    model_type = str(read_hf_fields(model_path).get("model_type", ""))
    # transformers' own types say less than its tokenizers do.
    made = make_renderer(
        renderer,
        cast(Tokenizer, tokenizer),
        model_type=model_type,
        checkpoint=model_path,
        reads_images=reads_images,
    )
    images = RunImages.from_model(model_path, tokenizer) if reads_images else None

    def decode(ids: list[int]) -> str:
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "decoding one list of ids gives one text"
        return text

    return Codec(
        renderer=made, decode=decode, images=images, max_chars_per_token=max_chars_per_token(tokenizer.get_vocab())
    )
