"""Explanations of a key: type, value, origin."""

import pytest

from rlscale.config.inspect.explain import Explanation, explain
from rlscale.config.load import load_config_with_notes
from rlscale.errors import ConfigError


def explained(path: str, *words: str) -> Explanation:
    return explain(path, load_config_with_notes(words, to_run=False))


def test_a_default() -> None:
    found = explained("algo.eps_clip")
    assert (found.type, found.constraint, found.default, found.value) == ("a number", "> 0", 0.2, 0.2)
    assert found.set_by == "default" and "clipped below" in found.description


def test_the_command_line_and_a_file() -> None:
    assert explained("optim.lr", "optim.lr=3e-4").set_by == "command line"
    from_file = explained("algo.eps_clip", "algo=gspo")
    assert from_file.value == 3e-4 and from_file.set_by.endswith("conf/algo/gspo.yaml:4")
    assert "conf/experiment/quickstart.yaml:" in explained("data.num_rollout").set_by


def test_an_interpolation_is_shown_as_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDTH_OF_THE_CLIP", "0.3")
    found = explained("algo.eps_clip", "algo.eps_clip=${oc.env:WIDTH_OF_THE_CLIP}")
    assert (found.value, found.set_by) == (0.3, "command line, as ${oc.env:WIDTH_OF_THE_CLIP}")


def test_a_derived_value_has_its_reason_and_the_replaced_value() -> None:
    found = explained("batch.global_batch_size")
    assert found.value == 384 and found.set_by == "derived: 384 samples per rollout / 1 step"
    assert found.replaced_from == ""
    replaced = explained("fsdp.attn_implementation", "cluster.device=cpu")
    assert (replaced.value, replaced.replaced) == ("sdpa", "flash_attention_2")
    assert "replaces    flash_attention_2 (default)" in "\n".join(replaced.lines())


def test_a_key_without_effect_has_a_warning() -> None:
    found = explained("batch.micro_batch_size", "batch.micro_batch_size=2")
    assert found.warning.startswith("batch.micro_batch_size is ignored")


def test_a_required_key() -> None:
    found = explained("batch.rollout_batch_size")
    assert found.required and "none, it must be set" in "\n".join(found.lines())


def test_keys_of_a_library_and_below_a_mapping() -> None:
    found = explained("sglang.page_size", "sglang.page_size=16")
    assert (found.value, found.set_by) == (16, "command line")
    assert "integer" in found.type and "SGLang" in found.description
    assert explained("sglang.page_size").value is None
    fraction = explained("megatron.optimizer_offload_fraction", "train=megatron", "megatron.optimizer_cpu_offload=true")
    assert (fraction.value, fraction.set_by) == (1.0, "derived: megatron.optimizer_cpu_offload, without a fraction")


def test_refused_arguments_of_a_library_have_the_reason() -> None:
    assert "Only null is allowed: the loss is not scaled" in explained("megatron.loss_scale").description
    assert "Only false is allowed: encoder servers of SGLang" in explained("sglang.encoder_only").description
    assert "train.lora.sync=adapter loads the adapters" in explained("sglang.enable_lora").description
    below = explained("data.apply_chat_template_kwargs.enable_thinking", "data.apply_chat_template_kwargs={a: 1}")
    assert below.value is None and below.type == "a mapping"


def test_an_unknown_key_gets_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"explain must be called with a known key, got algo.eps_clp; did you mean algo.eps_clip"
    ):
        explained("algo.eps_clp")
    with pytest.raises(ConfigError, match="explain must be called with a known key"):
        explained("sglang.pagesize")
