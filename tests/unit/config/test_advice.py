"""Advice that can be followed: for values of rlscale's own files, of lists and with bounds."""

import shlex

import pytest

from rlscale.config import load_config, load_config_with_notes
from rlscale.driver.preflight import check_run
from rlscale.errors import ConfigError
from tests.unit.config.config_errors import config_errors, only_error


@pytest.mark.parametrize(
    ("overrides", "advised"),
    [
        (["train.qkv_format=bshd"], "batch.use_dynamic_batch_size=false"),
        (["experiment=geo3k_vlm", "fsdp=long_context"], "fsdp.context_parallel_size=1"),
        (["experiment=geo3k_vlm", "buffer=local"], "buffer.url=null"),
        (["model.build=null", "model=qwen3_4b", "model.hf_checkpoint=null"], ""),
    ],
)
def test_a_value_of_a_file_of_rlscale_is_overridden_instead_of_removed(overrides: list[str], advised: str) -> None:
    found = config_errors(*overrides)
    assert not any("remove it" in each for each in found if "(conf/" in each), found
    if advised:
        (line,) = [each for each in found if f"set {advised}" in each]
        assert line.startswith(advised.partition("=")[0])
        assert not any(each.startswith(advised.partition("=")[0]) for each in config_errors(*overrides, advised))


def test_an_argument_of_a_library_gets_the_value_that_its_rule_names() -> None:
    given = ["experiment=deepseek_r1", "sglang.dp_size=1", "sglang.ep_size=1"]
    advised = "sglang.enable_dp_attention=false"
    assert f"set {advised}, or set sglang.attn_dp_size, too (conf/experiment" in only_error(given)
    assert config_errors(*given, advised) == []


@pytest.mark.parametrize(
    ("override", "advised"),
    [
        ("data.prompt_files='\"my data.jsonl\"'", "'data.prompt_files=[\"my data.jsonl\"]'"),
        ("data.prompt_files='\"/d/\u00fc.jsonl\"'", "'data.prompt_files=[\"/d/\u00fc.jsonl\"]'"),
        ("agent.tools='\"null\"'", "'agent.tools=[\"null\"]'"),
        ("sampling.difficulty_weights=1.5", "sampling.difficulty_weights=[1.5]"),
        ("data.prompt_files=a.jsonl", "data.prompt_files=[a.jsonl]"),
    ],
)
def test_a_single_entry_is_advised_as_a_list_that_a_shell_and_hydra_read(override: str, advised: str) -> None:
    (typed,) = shlex.split(override)
    assert f"; write {advised} (command line)" in only_error([typed])


@pytest.mark.parametrize("text", ["0.0", "-5.", "0x0"])
def test_a_corrected_number_is_within_the_bounds(text: str) -> None:
    found = only_error([f"model.num_layers='{text}'"])
    assert "remove it to use 4, from model=tiny_qwen3" in found


def test_a_name_of_many_digits_is_kept() -> None:
    assert load_config(["run.name=20261126164459123456"]).run.name == "20261126164459123456"
    assert "must fit into 64 bits" in only_error(["data.num_rollout=20261126164459123456"])


def test_sizes_of_a_wrong_magnitude_are_refused_at_once() -> None:
    found = only_error(["batch.rollout_batch_size=9999999999", "batch.global_batch_size=7"])
    assert found.startswith("batch.rollout_batch_size must be at most 125000 with batch.n_samples_per_prompt=8")
    found = only_error(["batch.rollout_batch_size=99999", "batch.global_batch_size=7"])
    assert "nearest are batch.global_batch_size=6 or 8, or batch.rollout_batch_size=99995 or 100002" in found


@pytest.mark.parametrize("key", ["eval.config", "custom_config_path", "checkpoint.save", "model.ref_load"])
def test_a_home_folder_of_no_user_is_refused(key: str) -> None:
    needed = ["algo.use_kl_loss=true"] if key == "model.ref_load" else []
    try:
        loaded = load_config_with_notes([f'{key}="~no_such_user/x"', *needed], check=check_run)
    except ConfigError as error:
        assert [problem.path for problem in error.problems] == [key]
    else:
        raise AssertionError(f"must be refused, got {loaded.config}")


@pytest.mark.parametrize(
    "override", ["rollout.stop_token_ids=1.5", "sampling.difficulty_weights=nan", "rollout.stop=[nan]"]
)
def test_no_list_is_advised_that_would_be_refused(override: str) -> None:
    assert "remove it to use the default, null" in only_error([override])
