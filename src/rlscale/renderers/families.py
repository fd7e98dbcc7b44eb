"""Renderers of the model families, and the choice of one for a tokenizer.

hub id or model_type ── candidates ──> equal to the chat template on probes? ── yes ──> renderer of the library
                                         └─ no, or none ──> the chat template itself, with the family's parser
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlscale.errors import RenderError
from rlscale.models.agent_tokenizer import AGENT_TEMPLATE, VISION_TEMPLATE
from rlscale.models.char_tokenizer import CHAT_TEMPLATE
from rlscale.renderers.answer_parser import FORMATS, Tokenizer
from rlscale.renderers.library_renderer import INSTALL, LibraryRenderer, library_name_of, library_names, load_library
from rlscale.renderers.renderer import Message, Renderer, ToolSpec
from rlscale.renderers.template_renderer import PROBE_TOOL, TemplateRenderer

AUTO = "auto"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RendererFamily:
    """Renderers of the models of one `model_type`."""

    library: tuple[str, ...] = ()  # hand-written renderers, in the order of trial
    answer_format: str | None = None  # of our own renderer, by `FORMATS`; None: only the library parses its answers
    stop_tokens: tuple[str, ...] = ()  # that end an answer, in addition to those of template and tokenizer


FAMILIES: Mapping[str, RendererFamily] = {
    "qwen2": RendererFamily(answer_format="hermes", stop_tokens=("<|im_end|>", "<|endoftext|>")),
    "qwen3": RendererFamily(library=("qwen3",), answer_format="hermes", stop_tokens=("<|im_end|>", "<|endoftext|>")),
    "qwen3_moe": RendererFamily(
        library=("qwen3",), answer_format="hermes", stop_tokens=("<|im_end|>", "<|endoftext|>")
    ),
    "llama": RendererFamily(
        library=("llama-3",), answer_format="llama3", stop_tokens=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
    ),
    "qwen2_5_vl": RendererFamily(answer_format="hermes", stop_tokens=("<|im_end|>", "<|endoftext|>")),
    "qwen3_vl": RendererFamily(answer_format="hermes", stop_tokens=("<|im_end|>", "<|endoftext|>")),
    "glm4": RendererFamily(answer_format="glm4", stop_tokens=("<|endoftext|>", "<|user|>", "<|observation|>")),
    "glm4_moe": RendererFamily(library=("glm-4.5",), stop_tokens=("<|endoftext|>", "<|user|>", "<|observation|>")),
    # GLM-4.7 has the template of GLM-5.
    "glm4_moe_lite": RendererFamily(library=("glm-5",), stop_tokens=("<|endoftext|>", "<|user|>", "<|observation|>")),
    # R1 and Moonlight have the model_type of V3 and other templates; Moonlight's has no tools.
    "deepseek_v3": RendererFamily(library=("deepseek-v3", "deepseek-r1"), stop_tokens=("<|im_end|>",)),
    "kimi_k2": RendererFamily(library=("kimi-k2",)),
    "mimo": RendererFamily(answer_format="hermes", stop_tokens=("<|im_end|>", "<|endoftext|>")),
    "minimax_m2": RendererFamily(library=("minimax-m2",)),
}
"""`model_type` of a family of `conf/model` -> its renderers, and the parser of tool calls and reasoning."""


TINY_FORMATS: Mapping[str, str] = {
    AGENT_TEMPLATE: "compact",
    VISION_TEMPLATE: "compact",
    CHAT_TEMPLATE: "hermes",
}
"""Chat template of a model of `model.build` -> format of its answers, whatever its architecture."""


def make_renderer(
    name: str, tokenizer: Tokenizer, *, model_type: str = "", checkpoint: str = "", reads_images: bool = False
) -> Renderer:
    """Builds the renderer of a model. Takes up to two seconds, most of it for the library's import.

    Args:
        name: `auto`; a renderer of the library, e.g. `qwen3`; or a format of `FORMATS` for the tokenizer's own chat
            template, e.g. `hermes`.
        tokenizer: of the model, by transformers.
        model_type: of the model's config.json.
        checkpoint: hub id or folder of the model.
        reads_images: messages may have images, which only the tokenizer's own chat template renders.

    Raises:
        RenderError: no renderer fits, with the reason.
    """
    if reads_images:
        return _image_renderer(tokenizer, model_type)
    if name in FORMATS:
        return _template_renderer(tokenizer, name, name=name, family=FAMILIES.get(model_type))
    if name != AUTO:
        if load_library() is not None and name not in library_names():
            known = ", ".join([AUTO, *FORMATS, *library_names()])
            raise RenderError(f"renderer must be one of {known}, got {name!r}")
        return LibraryRenderer(tokenizer, name)
    if (tiny := _tiny_format(tokenizer)) is not None:
        return _template_renderer(tokenizer, tiny, name=tiny, family=None)
    return _choose(tokenizer, model_type, checkpoint)


def _choose(tokenizer: Tokenizer, model_type: str, checkpoint: str) -> Renderer:
    family = FAMILIES.get(model_type)
    reasons = []
    known = library_name_of(checkpoint)
    candidates = dict.fromkeys([*([known] if known else []), *(family.library if family else ())])
    has_template = getattr(tokenizer, "chat_template", None) is not None
    for candidate in candidates:
        try:
            renderer = LibraryRenderer(tokenizer, candidate)
        except RenderError as error:
            reasons.append(str(error))
            continue
        # The library has tested this hub id itself.
        if not has_template and candidate == known:
            return renderer
        difference = _difference(renderer, tokenizer) if has_template else "the tokenizer has no chat template"
        if difference is None:
            return renderer
        reasons.append(f"{candidate} is not proven: {difference}")
    if family is not None and family.answer_format is None and not _is_without_tools(tokenizer):
        why = "; ".join(reasons) or f"the package renderers is missing; {INSTALL}"
        raise RenderError(f"no renderer fits {checkpoint or model_type}: {why}")
    # Not a warning: the chat template is exact, and usual for fine-tuned models.
    for reason in reasons:
        _LOG.info("renderer: %s; the chat template renders", reason)
    answer_format = family.answer_format if family and family.answer_format else _guess_format(tokenizer)
    return _template_renderer(tokenizer, answer_format, name=model_type or answer_format, family=family)


def _is_without_tools(tokenizer: Tokenizer) -> bool:
    """Whether the chat template knows no tools: its answers have no calls that only the library could parse."""
    template = getattr(tokenizer, "chat_template", None)
    return template is not None and "tool" not in str(template)


def _guess_format(tokenizer: Tokenizer) -> str:
    """The format of an unknown family, by what its chat template writes."""
    template = str(getattr(tokenizer, "chat_template", ""))
    return "hermes" if "<tool_call>" in template else "plain"


def _tiny_format(tokenizer: Tokenizer) -> str | None:
    """The format of a tiny model, also with an edited template; None: it is another model."""
    template = str(getattr(tokenizer, "chat_template", ""))
    return TINY_FORMATS.get(template, "compact" if "<|call|>" in template else None)


def _image_renderer(tokenizer: Tokenizer, model_type: str) -> TemplateRenderer:
    family, tiny = FAMILIES.get(model_type), _tiny_format(tokenizer)
    found = tiny or (family.answer_format if family else None) or _guess_format(tokenizer)
    return _template_renderer(
        tokenizer, found, name=model_type or found, family=None if tiny else family, reads_images=True
    )


def _template_renderer(
    tokenizer: Tokenizer, answer_format: str, *, name: str, family: RendererFamily | None, reads_images: bool = False
) -> TemplateRenderer:
    vocabulary = tokenizer.get_vocab()
    stops = [vocabulary[token] for token in (family.stop_tokens if family else ()) if token in vocabulary]
    return TemplateRenderer(tokenizer, FORMATS[answer_format], name=name, stop_ids=stops, reads_images=reads_images)


def _difference(renderer: Renderer, tokenizer: Tokenizer) -> str | None:
    """Reports where a renderer differs from the tokenizer's chat template; None: nowhere on the probes."""
    template = TemplateRenderer(tokenizer, FORMATS["plain"], name="template")
    for number, (messages, tools) in enumerate(_parity_probes(template), 1):
        try:
            ids = renderer.render(messages, tools=tools)
        except RenderError as error:
            return str(error)
        if ids != template.render(messages, tools=tools):
            return f"it differs from the chat template on probe {number}"
    return None


def _parity_probes(template: TemplateRenderer) -> Iterator[tuple[Sequence[Message], Sequence[ToolSpec]]]:
    """Conversations that the chat template renders; tools only where it has them."""
    system, user = {"role": "system", "content": "Be short."}, {"role": "user", "content": "Is it 2+2?"}
    again = {"role": "user", "content": "Sure?"}
    yield [user], ()
    yield [user, {"role": "assistant", "content": "Yes."}, again], ()
    for messages, tools in (([system, user], ()), ([system, user], (PROBE_TOOL,))):
        try:
            template.render(messages, tools=tools)
        except RenderError:  # the template has no such messages
            continue
        yield messages, tools
