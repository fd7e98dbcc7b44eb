"""Group `sglang`: interpreter, keys of the server, and problems of other keys."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import load_config, to_dict, to_yaml
from rlscale.config.load import load_config_with_notes
from rlscale.config.passthrough.field_types import fits, type_in_words
from rlscale.config.passthrough.sglang_args import RECORDED, RESERVED, load_arguments
from rlscale.config.passthrough.sglang_python import find_python, version_numbers
from rlscale.config.passthrough.sglang_renames import REMOVED, RENAMED
from tests.unit.config.config_errors import config_errors, only_error

SGLANG = "rollout=sglang"


def test_arguments_of_the_server_are_keys_of_the_group() -> None:
    config = load_config(
        [SGLANG, "sglang.page_size=16", "sglang.enable_mixed_chunk=false", "sglang.mem_fraction_static=0.5"]
    )
    assert config.sglang.server_args == {"page_size": 16, "enable_mixed_chunk": False}
    assert config.sglang.mem_fraction_static == 0.5
    assert to_dict(config)["sglang"]["page_size"] == 16


def test_values_of_the_environment_get_the_type_of_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBER", "16")
    config = load_config(
        [SGLANG, "sglang.page_size=${oc.env:NUMBER}", "sglang.max_running_requests=${batch.rollout_batch_size}"]
    )
    assert config.sglang.server_args == {"page_size": 16, "max_running_requests": config.batch.rollout_batch_size}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${oc.env:NO_SUCH}", "must refer to an environment variable that is set, got ${oc.env:NO_SUCH}; set NO_SUCH"),
        ("${oc.env:NO_SUCH,many}", "must be an integer, got many; remove it to use the library's default"),
        ("${batch.no_such}", "must refer to a key that exists, got ${batch.no_such}; "),
    ],
)
def test_wrong_interpolations_of_arguments_are_reported(value: str, message: str) -> None:
    assert f"sglang.dp_size {message}" in only_error([SGLANG, f"sglang.dp_size={value}"])


def test_a_written_config_reads_back(tmp_path: Path) -> None:
    config = load_config([SGLANG, "sglang.page_size=16", "sglang.cuda_graph_config={decode:{max_bs:8}}"])
    folder = tmp_path / "experiment"
    folder.mkdir()
    text = to_yaml(config).replace("\nrun:", "\nrun:", 1)
    (folder / "again.yaml").write_text(f"# @package _global_\n{text}")
    again = load_config(["experiment=again"], config_dir=tmp_path)
    assert again.sglang == config.sglang
    assert again.sglang.server_args["cuda_graph_config"] == {"decode": {"max_bs": 8}}


def test_keys_of_a_file_are_passed_through_and_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "mine.yaml").write_text(
        "# @package _global_\nrollout:\n  engine: sglang\nsglang:\n  page_size: 4\n  pag_size: 5\n"
    )
    message = only_error(["rollout=mine"], config_dir=tmp_path)
    assert message.startswith(
        "sglang.pag_size must be a key of this group or an argument of SGLang 0.5.23's server, got 5"
    )
    assert "did you mean sglang.page_size? (" in message and "mine.yaml:6)" in message


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sglang.page_size=large", "sglang.page_size must be an integer or null, got large"),
        ("sglang.page_size=true", "sglang.page_size must be an integer or null, got true"),
        ("sglang.enable_lora_overlap_loading=1", "overlap_loading must be true or false or null, got 1"),
        ("sglang.schedule_conservativeness=x", "sglang.schedule_conservativeness must be a number, got x"),
        ("sglang.cuda_graph_bs_decode=[1,a]", "must be a list (each entry an integer) or null, got"),
        ("sglang.deepep_mode=fast", "sglang.deepep_mode must be one of auto|normal|low_latency, got fast"),
        (
            "sglang.tp_size=2",
            "must not be set, because rlscale sets it, got 2; set cluster.rollout_num_gpus_per_engine",
        ),
        ("sglang.model_path=x", "must not be set, because rlscale sets it, got x; set model.hf_checkpoint"),
        ("sglang.server_concurency=9", "did you mean sglang.server_concurrency?"),
        ("sglang.zzzzzzzzz=9", "`python -m sglang.launch_server --help` lists them"),
        ("~sglang.page_size", "sglang.page_size must"),
    ],
)
def test_an_invalid_key_or_value_is_reported(word: str, message: str) -> None:
    assert message in only_error([SGLANG, word])


def test_all_invalid_keys_are_reported_together() -> None:
    found = config_errors(SGLANG, "sglang.pag_size=1", "sglang.port=1", "optim.lr=-1")
    assert [line.split(" ")[0] for line in found] == ["sglang.pag_size", "sglang.port", "optim.lr"]


def test_reserved_names_are_arguments_of_the_server() -> None:
    assert set(load_arguments(None).types) >= set(RESERVED)


def test_ignored_keys_are_reported_without_sglang() -> None:
    warnings = load_config_with_notes(["sglang.page_size=16", "sglang.server_concurrency=4", "router.policy=random"])
    assert "sglang.page_size is ignored: rollout.engine is not sglang" in warnings.warnings
    assert "sglang.server_concurrency is ignored: rollout.engine is not sglang" in warnings.warnings
    assert any(line.startswith("router.policy is ignored: there is no router") for line in warnings.warnings)


@pytest.mark.parametrize(
    ("value", "kind", "good"),
    [
        (1, "int", True),
        (True, "int", False),
        (1, "float", True),
        (None, "int|null", True),
        (None, "int", False),
        ([1, 2.5], "list[float]|null", True),
        ([1, "a"], "list[int|str]", True),
        ([[1]], "list[int]", False),
        ({"a": 1}, "str|dict|null", True),
        ("a", '"a"|"b"', True),
        ("c", '"a"|"b"', False),
        (2, "1|2", True),
        (3, "1|2", False),
        (object, "any", True),
    ],
)
def test_fits(value: Any, kind: str, good: bool) -> None:
    assert fits(value, kind) == good


def test_every_recorded_type_can_be_checked_and_described() -> None:
    types = json.loads(RECORDED.read_text())["types"]
    assert len(types) > 500
    for kind in types.values():
        fits("?", kind)
        assert type_in_words(kind)


def test_the_interpreter_that_is_given_wins(tmp_path: Path) -> None:
    assert find_python("/some/python") == Path("/some/python")
    assert find_python(None).name.startswith("python") and find_python(None).is_absolute()


@pytest.mark.parametrize(
    ("text", "numbers"), [("0.5.23", (0, 5, 23)), ("0.5.23.post1", (0, 5, 23)), ("0.6.0+cpu", (0, 6, 0)), ("", ())]
)
def test_version_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version_numbers(text) == numbers


def test_several_engines_of_sglang_get_a_router() -> None:
    one, two = (load_config([SGLANG, f"cluster.rollout_num_gpus={n}", "cluster.num_gpus_per_node=4"]) for n in (1, 2))
    assert one.router.enabled is False and one.router.timeout_s is None
    assert two.router.enabled is True
    assert two.router.timeout_s == two.rollout.timeout_s and two.router.max_connections == 1024
    off = load_config([SGLANG, "cluster.rollout_num_gpus=2", "router.enabled=false"])
    assert off.router.enabled is False
    enabled = load_config(["router.enabled=true", "router.max_connections=7", "router.timeout_s=5"])
    assert enabled.router.enabled is True and enabled.router.max_connections == 7 and enabled.router.timeout_s == 5


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("mem_fraction", "mem_fraction_static"),
        ("mem_fracton", "mem_fraction_static"),
        ("no_radix_cache", "disable_radix_cache"),
        ("chunked_prefill", "chunked_prefill_size"),
        ("max_running", "max_running_requests"),
        ("moe_backend", "moe_a2a_backend"),
    ],
)
def test_a_suggestion_has_the_words_of_the_name(name: str, meant: str) -> None:
    assert f"did you mean sglang.{meant}?" in only_error([SGLANG, f"sglang.{name}=1"])


def test_an_abbreviation_of_a_reserved_argument_gets_its_key_only() -> None:
    fix = only_error([SGLANG, "sglang.tp=2"]).partition("; ")[2]
    assert fix.startswith("set cluster.rollout_num_gpus_per_engine,")


EARLIER = (Path(__file__).parents[3] / "data" / "sglang_earlier_arguments.txt").read_text().split()
"""Arguments and options of 0.4.0, 0.4.3, 0.4.6, 0.4.9, 0.5.1, 0.5.4, 0.5.8 and 0.5.12 that 0.5.23 lacks."""


def test_every_earlier_argument_is_answered() -> None:
    present = load_arguments(None).types
    assert len(EARLIER) == 91 and not set(EARLIER) & set(present)
    assert [name for name in EARLIER if name not in RENAMED and name not in REMOVED] == []
    assert set(RENAMED.values()) <= set(present) and not set(RENAMED) & set(REMOVED)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("stream_output", "did you mean sglang.incremental_streaming_output?"),
        ("disable_mla", "remove it: SGLang has no argument in its place any more"),
        ("hierarchical_sparse_attention_extra_config", "did you mean sglang.hisparse_config?"),
        ("model", "set model.hf_checkpoint"),
        ("nccl_init_addr", "remove it: the cluster.* keys place the engines"),
    ],
)
def test_an_earlier_argument(name: str, fix: str) -> None:
    assert only_error([SGLANG, f"sglang.{name}=true"]).partition("; ")[2].startswith(fix)
