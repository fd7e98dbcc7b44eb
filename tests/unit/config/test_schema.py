"""Nested values of a config: converted one by one, or resolved as a whole when a value refers to another."""

from copy import deepcopy
from operator import attrgetter
from typing import Any

import pytest

from rlscale.config.check_fields import check_fields
from rlscale.config.hydra.yaml_files import set_nested
from rlscale.config.schema import get_value, nested_values
from tests.unit.config.options import EXPERIMENTS, composed

REFERENCE = "${algo.advantage_estimator}"


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_reference_changes_no_other_value(experiment: str) -> None:
    values = composed(f"experiment={experiment}")
    with_reference = deepcopy(values)
    set_nested(with_reference, "run.name", REFERENCE)
    alone, together = (check_fields(each, lambda _: "") for each in (values, with_reference))
    assert together.config.run.name == str(alone.config.algo.advantage_estimator)
    together.config.run.name = alone.config.run.name
    assert together.config == alone.config and repr(together.config) == repr(alone.config)
    assert together.broken == alone.broken and together.keys == alone.keys | {"run.name"}


@pytest.mark.parametrize(
    ("path", "given", "expected"),
    [
        ("optim.lr", 1, 1.0),
        ("optim.lr", "1e-3", 1e-3),
        ("data.num_rollout", "3", 3),
        ("data.num_rollout", None, None),
        ("algo.use_kl_loss", "true", True),
        ("rollout.stop", ["a", "b"], ["a", "b"]),
        ("train.env_vars", {"A": "x"}, {"A": "x"}),
    ],
)
@pytest.mark.parametrize("reference", [False, True])
def test_a_value_is_converted_to_the_type_of_its_key(path: str, given: Any, expected: Any, reference: bool) -> None:
    values: dict[str, Any] = {}
    set_nested(values, path, given)
    if reference:
        set_nested(values, "run.name", REFERENCE)
    found = attrgetter(path)(check_fields(values, lambda _: "").config)
    assert found == expected and type(found) is type(expected)


def test_two_configs_share_no_mapping() -> None:
    first, second = (check_fields({"train": {"env_vars": {"A": "x"}}}, lambda _: "").config for _ in range(2))
    first.train.env_vars["A"] = "y"
    assert second.train.env_vars == {"A": "x"}
    nested, problems = nested_values({}, {}, lambda _: "", set())
    get_value(nested, "train.env_vars")["A"] = "z"
    assert problems == [] and get_value(nested_values({}, {}, lambda _: "", set())[0], "train.env_vars") == {}
