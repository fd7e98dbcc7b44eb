import copy
import csv
import pickle
from operator import attrgetter
from pathlib import Path

import pytest

from rlscale.config import EngineKind
from rlscale.config.keys import keys
from rlscale.plugins.args_view import Args, WritableArgs
from rlscale.plugins.argument_keys import ARGUMENT_KEYS
from tests.unit.config.rules.valid_config import MEGATRON, config_with

TABLE = Path(__file__).parents[2] / "data" / "arguments.csv"


def document_names() -> dict[str, set[str]]:
    """Attribute of `args` -> its keys, from the table of arguments."""
    found: dict[str, set[str]] = {}
    with TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["argument"] and not row["experiment"] and "." not in row["argument"]:
                name = row["argument"].lstrip("-").replace("-", "_")
                if "store_false" in row["type"]:
                    feature = name.removeprefix("disable_")
                    name = "enable_weights_backuper" if feature == "weights_backuper" else feature
                found.setdefault(name, set()).add(row["key"])
    return found


def test_every_argument_of_slime_is_an_attribute() -> None:
    names = document_names()
    assert names.keys() == ARGUMENT_KEYS.keys()
    assert all(ARGUMENT_KEYS[name] in found for name, found in names.items())
    assert set(ARGUMENT_KEYS.values()) <= keys().keys()


def test_engines_of_two_sizes_are_counted() -> None:
    groups = {"prefill": {"num_gpus": 4, "num_gpus_per_engine": 2}, "decode": {"num_gpus": 8, "num_gpus_per_engine": 4}}
    values = {"rollout.engine": EngineKind.sglang, "cluster.rollout_num_gpus": 12, "sglang.server_groups": groups}
    assert Args(config_with({**values, "sglang.config": "engines.yaml"})).rollout_num_engines == 4


def test_values_are_those_of_the_keys() -> None:
    config = config_with({"batch.rollout_batch_size": 24, "sglang.server_args": {"page_size": 16}})
    args = Args(config)
    for name in ARGUMENT_KEYS.keys() - {"context_parallel_size"}:
        assert getattr(args, name) == attrgetter(ARGUMENT_KEYS[name])(config), name
    assert (args.rollout_batch_size, args.sglang_page_size, args.sglang_dp_size) == (24, 16, 1)


@pytest.mark.parametrize("group", ["fsdp", "megatron"])
def test_an_argument_of_two_backends_is_that_of_the_one_in_use(group: str) -> None:
    backend = MEGATRON if group == "megatron" else {"train.backend": "fsdp"}
    args = Args(config_with({**backend, f"{group}.context_parallel_size": 4}))
    assert args.context_parallel_size == 4


def test_custom_values_hide_arguments_and_values_of_the_run_are_attributes() -> None:
    config = config_with({"custom": {"max_turns": 5, "rm_type": "mine", "tools": {"names": ["a"]}}})
    args = Args(config, runtime={"sglang_router_ip": "127.0.0.1", "sglang_router_port": 30000})
    assert (args.max_turns, args.rm_type, args.tools) == (5, "mine", {"names": ["a"]})
    assert f"http://{args.sglang_router_ip}:{args.sglang_router_port}" == "http://127.0.0.1:30000"
    args.tools["names"].append("b")
    assert config.custom["tools"] == {"names": ["a"]}
    assert args.with_runtime({"sglang_router_port": 1}).sglang_router_port == 1
    assert args.sglang_router_port == 30000


def test_an_unknown_name_is_an_attribute_error_with_the_nearest_name() -> None:
    args = Args(config_with({}))
    with pytest.raises(AttributeError, match=r"args\.rollout_batchsize must be .*; did you mean rollout_batch_size"):
        _ = args.rollout_batchsize
    with pytest.raises(AttributeError, match=r"args\.zzzzzz must be .*; set it with custom\.zzzzzz=<value>"):
        _ = args.zzzzzz
    assert getattr(args, "zzzzzz", 3) == 3 and not hasattr(args, "zzzzzz")
    assert "rollout_batch_size" in args and "zzzzzz" not in args


def test_it_is_read_only() -> None:
    args = Args(config_with({}))
    before = args.rollout_batch_size
    with pytest.raises(AttributeError, match=r"args\.rollout_batch_size must not be written, got 3"):
        args.rollout_batch_size = 3
    with pytest.raises(AttributeError, match=r"args\.new must not be written"):
        args.new = 3
    with pytest.raises(AttributeError, match="must not be deleted"):
        del args.rollout_batch_size
    assert args.rollout_batch_size == before


def test_it_can_be_pickled_and_copied() -> None:
    args = Args(config_with({"custom": {"max_turns": 5}}))
    for other in (pickle.loads(pickle.dumps(args)), copy.deepcopy(args), copy.copy(args)):
        assert other == args and other is not args
        with pytest.raises(AttributeError):
            other.max_turns = 6
    assert vars(args)["max_turns"] == 5


def test_a_writable_copy_belongs_to_one_call() -> None:
    args = Args(config_with({}))
    one = WritableArgs(args)
    one.rollout_batch_size, one.results = 3, {}
    assert (one.rollout_batch_size, one.results) == (3, {})
    assert args.rollout_batch_size != 3 and "results" not in args
    assert copy.deepcopy(one).results == {}
