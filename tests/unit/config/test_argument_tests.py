"""Every argument of generation, data and their surroundings has a test of its effect, which exists."""

import ast
import csv
from functools import cache
from pathlib import Path

import pytest

from rlscale.config.keys import keys
from rlscale.config.user_functions import HOOKS
from tests.unit.config.arguments import rows

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "tests" / "data" / "argument_tests.csv"
GROUPS = (
    *("rollout", "sampling", "reward", "data", "eval", "router", "buffer", "network", "logging", "debug"),
    # Single keys of other groups that name a function of the user.
    *("megatron.init_hook_path", "megatron.before_log_prob_hook_path", "megatron.before_train_step_hook_path"),
    *("algo.custom_loss_function_path", "algo.custom_tis_function_path", "train.rollout_data_postprocess_path"),
    *("model.custom_model_provider_path", "custom_config_path", "train.convert_samples_path"),
)


def table() -> list[tuple[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [(row["key"], row["test"]) for row in csv.DictReader(file)]


@cache
def functions_of(path: str) -> frozenset[str]:
    """Names of the functions of a file of tests; empty where there is no such file."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("group", GROUPS)
def test_every_argument_of_a_group_has_a_test(group: str) -> None:
    names = {row["key"] for row in rows()} | keys().keys()  # arguments of slime, and all keys
    arguments = {name for name in names if name == group or name.startswith(f"{group}.")}
    assert arguments and arguments <= {key for key, _ in table()}


def test_every_key_of_generation_and_every_hook_has_a_test() -> None:
    own = {key for key in keys() if key.startswith(("rollout.", "sampling.", "reward."))}
    assert own and sorted((own | set(HOOKS)) - {key for key, _ in table()}) == []


def test_every_named_test_exists() -> None:
    absent = []
    for key, test in table():
        path, _, name = test.partition("::")
        if name not in functions_of(path):
            absent.append(f"{key}: {test}")
    assert absent == []


def test_the_table_is_sorted_and_has_each_pair_once() -> None:
    assert table() == sorted(set(table()))
