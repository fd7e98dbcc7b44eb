from pathlib import Path
from typing import Any

import pytest
import yaml

from rlscale.architectures.hf_config import tiny_model_fields
from rlscale.errors import RenderError
from rlscale.models.tiny_tokenizer import tiny_tokenizer
from rlscale.renderers import families
from rlscale.renderers.families import FAMILIES, make_renderer
from rlscale.renderers.renderer import Renderer
from tests.family_tokenizers import family_tokenizer

EXPECTED = {
    "qwen25_vl": ("qwen", "qwen2_5_vl"),
    "qwen3_vl": ("qwen", "qwen3_vl"),
    "qwen25": ("qwen", "qwen2"),
    "qwen3": ("qwen", "qwen3"),
    "llama": ("llama3", "llama-3"),
    "glm4_9b": ("glm4", "glm4"),
    "glm45": ("glm45", "glm-4.5"),
    "deepseek_v3": ("deepseek_v3", "deepseek-v3"),
    "deepseek_r1": ("deepseek_r1", "deepseek-r1"),
    "kimi": ("kimi_k2", "kimi-k2"),
    "moonlight": ("moonlight", "deepseek_v3"),
    "glm47": ("glm5", "glm-5"),
    "mimo": ("qwen", "mimo"),
    "minimax_m2": ("minimax_m2", "minimax-m2"),
}
"""Beginning of a file of conf/model -> its small tokenizer here, and the renderer that is chosen."""

FOLDER = Path(__file__).parents[3] / "conf" / "model"
MODELS = sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem != "hf")
USER, TOOL = {"role": "user", "content": "1+2="}, {"role": "tool", "tool_call_id": "call_0", "content": "3"}


def model_fields(name: str) -> dict[str, Any]:
    """The keys of a file of conf/model, with those of its base."""
    fields = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    bases = [base for base in fields.pop("defaults", []) if base != "_self_"]
    return {key: value for base in bases for key, value in model_fields(base).items()} | fields


def renderer_of(name: str) -> Renderer:
    """The renderer of a file of conf/model, with a small tokenizer of its family."""
    fields = model_fields(name)
    if build := fields.get("build"):
        tokenizer = tiny_tokenizer(build, 512)
        return make_renderer("auto", tokenizer, model_type=tiny_model_fields(build)["model_type"], checkpoint="folder")
    short = next(EXPECTED[start][0] for start in EXPECTED if name.startswith(start))
    return make_renderer(
        "auto", family_tokenizer(short), model_type=fields["model_type"], checkpoint=fields["hf_checkpoint"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_renderer_with_a_bridge(name: str) -> None:
    renderer = renderer_of(name)
    expected = next((EXPECTED[start][1] for start in EXPECTED if name.startswith(start)), None)
    tiny = dict.fromkeys(("tiny_qwen3_agent", "tiny_qwen2_5_vl", "tiny_qwen3_vl"), "compact")
    assert renderer.name == (expected or tiny.get(name, "hermes"))
    known = [*renderer.render([USER]), renderer.stop_ids[0]]
    cut = renderer.render([USER])
    for new in ([USER], [TOOL]):
        for previous in (known, cut):
            longer = renderer.bridge(previous, new)
            # A reasoning that never ended has no bridge if the answer was not cut.
            assert longer is None or longer[: len(previous)] == previous
        assert renderer.bridge(cut, new) is not None


def test_a_model_of_another_template_gets_the_template_itself() -> None:
    renderer = make_renderer("auto", family_tokenizer("forgetful"), model_type="qwen3", checkpoint="x")
    assert type(renderer).__name__ == "TemplateRenderer" and renderer.name == "qwen3"


def test_an_edited_template_of_a_tiny_model_keeps_its_format() -> None:
    tokenizer = tiny_tokenizer("tiny_qwen3_agent", 512)
    tokenizer.chat_template = "{# ours #}" + str(tokenizer.chat_template)
    assert make_renderer("auto", tokenizer, model_type="qwen3").name == "compact"


def test_a_template_without_tools_needs_no_parser_of_the_library() -> None:
    """Moonlight has the model_type of DeepSeek-V3, and an answer ends at a token that only its template names."""
    tokenizer = family_tokenizer("moonlight")
    renderer = make_renderer("auto", tokenizer, model_type="deepseek_v3", checkpoint="moonshotai/Moonlight-16B-A3B")
    assert type(renderer).__name__ == "TemplateRenderer"
    assert tokenizer.get_vocab()["<|im_end|>"] in renderer.stop_ids


def test_a_family_without_own_parser_is_refused_with_the_reason() -> None:
    with pytest.raises(RenderError, match="kimi-k2 does not fit the tokenizer: Special token"):
        make_renderer("auto", family_tokenizer("qwen"), model_type="kimi_k2", checkpoint="kimi")


def test_without_the_library_families_with_an_own_parser_still_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlscale.renderers import library_renderer

    for module in (families, library_renderer):
        monkeypatch.setattr(module, "load_library", lambda: None)
    assert make_renderer("auto", family_tokenizer("qwen"), model_type="qwen3").name == "qwen3"
    with pytest.raises(RenderError, match=r"pip install 'rlscale\[agents\]'"):
        make_renderer("auto", family_tokenizer("glm45"), model_type="glm4_moe")
    with pytest.raises(RenderError, match=r"pip install 'rlscale\[agents\]'"):
        make_renderer("glm-4.5", family_tokenizer("glm45"))


@pytest.mark.parametrize("name", ["default", "custom", "qwen9"])
def test_unknown_names_and_the_library_s_fallback_are_refused(name: str) -> None:
    with pytest.raises(RenderError, match="renderer must be one of auto, hermes"):
        make_renderer(name, family_tokenizer("qwen"))


def test_a_tokenizer_without_template_needs_a_name() -> None:
    tokenizer = family_tokenizer("glm45")
    tokenizer.chat_template = None
    with pytest.raises(RenderError, match=r"glm-4\.5 is not proven: the tokenizer has no chat template"):
        make_renderer("auto", tokenizer, model_type="glm4_moe", checkpoint="mine")
    assert make_renderer("auto", tokenizer, model_type="glm4_moe", checkpoint="zai-org/GLM-4.5-Air").name == "glm-4.5"
    assert make_renderer("glm-4.5", tokenizer).name == "glm-4.5"


def test_the_table_has_every_family_of_the_model_files() -> None:
    assert {model_fields(name).get("model_type") for name in MODELS} - {None} == set(FAMILIES)
