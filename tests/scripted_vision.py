"""A policy that answers by a script, with the tokenizer, image processor and renderer of a tiny model with images."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerFast

from rlscale.config import ModelBuild
from rlscale.images import IMAGE_TYPE, Image, to_data_url
from rlscale.models.hf_models import load_tokenizer
from rlscale.renderers.answer_parser import Tokenizer
from rlscale.renderers.families import AUTO, make_renderer
from rlscale.renderers.renderer import Renderer
from rlscale.renderers.run_images import RunImages
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import GenerateSession
from rlscale.types import Generation, Prompt, SamplingParams
from tests.tiny_vision import write_tiny_vision


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionModel:
    """A tiny model with images, without its weights."""

    tokenizer: PreTrainedTokenizerFast
    images: RunImages
    renderer: Renderer

    def prompt(self, *pictures: bytes) -> Prompt:
        """A row with a picture for each mark."""
        messages = ({"role": "user", "content": "look " + "<image>" * len(pictures)},)
        opened = tuple(self.images.processor.open(to_data_url(each), each) for each in pictures)
        parts = [{"type": "text", "text": "look "}, *[{"type": IMAGE_TYPE}] * len(pictures)]
        ids = self.renderer.render([{"role": "user", "content": parts}])
        ids = self.images.processor.layout.expand(ids, [image.grid for image in opened])
        return Prompt(index=0, text="", token_ids=tuple(ids), images=opened, messages=messages)


def open_vision_model(folder: Path) -> VisionModel:
    """Tokenizer, image processor and renderer of a tiny model that is written into a folder."""
    path = write_tiny_vision(ModelBuild.tiny_qwen3_vl, folder)
    tokenizer = load_tokenizer(path)
    return VisionModel(
        tokenizer=cast(PreTrainedTokenizerFast, tokenizer),
        images=RunImages.from_model(path, tokenizer),
        renderer=make_renderer(AUTO, cast(Tokenizer, tokenizer), model_type="qwen3_vl", reads_images=True),
    )


class VisionPool:
    """Answers by a script."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, answers: Sequence[str]) -> None:
        self._tokenizer, self._answers = tokenizer, iter(answers)
        self.requests: list[tuple[list[int], tuple[Image, ...]]] = []

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, n: int, **options: Any
    ) -> list[Generation]:
        self.requests.append((list(token_ids), params.images))
        text = next(self._answers)
        is_aborted, ids = text.endswith("..."), self._tokenizer.encode(text, add_special_tokens=False)
        ids += [] if is_aborted else [self._tokenizer.eos_token_id]
        return [
            Generation(
                output_ids=ids,
                logprobs=[-1.0] * len(ids),
                weight_versions=[1] * len(ids),
                finish_reason="abort" if is_aborted else "stop",
                text=text,
                engine="scripted",
            )
        ]


def vision_session(pool: VisionPool, prompt: Prompt, **params: Any) -> GenerateSession:
    own = SamplingParams(**{"max_new_tokens": 200, "images": prompt.images, **params})
    return GenerateSession(params=own, rid="r", pool=cast(EnginePool, pool), versions=(1, 1))
