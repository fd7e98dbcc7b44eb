"""What a library cannot do is refused with the reason, and the advice works."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlscale.config import load_config_with_notes
from rlscale.config.library_limits import LIMITS
from tests.unit.config.config_errors import config_errors, only_error

ROOT = Path(__file__).parents[3]
HOW_TO = ROOT / "docs" / "how-to"
PAGES = {"megatron": HOW_TO / "megatron.md", "sglang": HOW_TO / "sglang.md"}
GLM: list[str] = ["model=hf", "model.hf_checkpoint=/m", "model.model_type=glm_moe_dsa", "rollout=sglang"]

CASES = [
    (
        ["optim.name=deepspeed_cpu_adam"],
        "optim.name must be adam or muon with train.backend=megatron: Megatron-core 0.16 has another optimizer in "
        "host memory, got deepspeed_cpu_adam; set optim.name=adam and megatron.optimizer_cpu_offload=true, or "
        "choose train=fsdp (command line; train.backend: ",
        [["optim.name=adam", "megatron.optimizer_cpu_offload=true"], ["optim.name=deepspeed_cpu_adam", "train=fsdp"]],
    ),
    (
        ["megatron.cuda_graph_impl=local"],
        "megatron.cuda_graph_impl must be none: CUDA graphs of Megatron-core 0.16 repeat one shape, and micro-batches "
        "of packed samples differ in length, got local; remove it (command line)",
        [[]],
    ),
]


@pytest.mark.parametrize(("words", "message", "advice"), CASES, ids=lambda value: str(value[0])[:30])
def test_a_value_that_a_library_cannot_carry_out_is_refused(
    words: list[str], message: str, advice: list[list[str]]
) -> None:
    assert only_error(["train=megatron", *words]).startswith(message)
    for other in advice:
        assert config_errors("train=megatron", *other) == []


def test_a_family_without_layers_is_refused_with_megatron_alone() -> None:
    (message,) = [text for text in config_errors("train=megatron", *GLM) if text.startswith("train.backend must ")]
    assert "be fsdp with model.model_type=glm_moe_dsa: Megatron-core 0.16 has its sparse attention only" in message
    assert message.partition("; ")[2].startswith("choose train=fsdp")
    assert not any(text.startswith("train.backend must ") for text in config_errors("train=fsdp", *GLM))


def test_inspecting_a_config_reports_no_limit() -> None:
    loaded = load_config_with_notes(["train=megatron", "megatron.qk_clip=true"], to_run=False)
    assert loaded.config.megatron.core_args == {"qk_clip": True}


@pytest.mark.parametrize("path", LIMITS)
def test_a_reason_names_a_version_and_a_page_has_the_evidence(path: str) -> None:
    group, _, name = path.partition(".")
    version = {"megatron": "Megatron-core 0.16", "sglang": "SGLang 0.5.23"}[group]
    assert version in LIMITS[path].reason
    rows = [line for line in PAGES[group].read_text(encoding="utf-8").splitlines() if f"`{path}`" in line]
    assert any(re.match(r"[|].*[|].*`[a-z_0-9/]+[.]py`.*[|]$", row) for row in rows), f"{name} has no row with a file"


def test_the_files_of_the_evidence_exist() -> None:
    spec = find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    section = PAGES["megatron"].read_text(encoding="utf-8").partition("## What Megatron-core 0.16 cannot do here")[2]
    files = re.findall(r"`([a-z_0-9/]+[.]py)`", section.partition("\n## ")[0])
    assert len(files) >= len(LIMITS) // 2
    assert [name for name in files if not (Path(spec.origin).parent / name).is_file()] == []
