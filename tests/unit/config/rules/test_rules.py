"""Each rule with values that violate it and values that satisfy it, and the trace of the keys that it reads."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

import pytest

from rlscale.config import AlgoConfig, RunConfig
from rlscale.config.keys import keys
from rlscale.config.rules import RULES, Rule, check_rules, find_unaffected
from rlscale.config.rules.rule import rule
from rlscale.errors import Problem
from scripts.docs.rules import keys_read
from tests.unit.config.rules.cases import CASES
from tests.unit.config.rules.valid_config import Values, config_with, valid_config

IDS = [f"{name}-{number}" for number, (name, *_) in enumerate(CASES)]
PASSED_ON = {"sglang.server_args", "megatron.core_args"}


def find_rule(name: str) -> Rule:
    return next(rule for rule in RULES if rule.name == name)


def test_the_valid_config_satisfies_every_rule() -> None:
    assert check_rules(valid_config()) == []


def test_every_rule_has_a_case() -> None:
    assert {case[0] for case in CASES} == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES) > 70


@pytest.mark.parametrize(("name", "violating", "message", "satisfying"), CASES, ids=IDS)
def test_both_sides(name: str, violating: Values, message: str, satisfying: Values) -> None:
    rule = find_rule(name)
    problems = rule(config_with(violating))
    assert any(message in str(problem) for problem in problems), [str(problem) for problem in problems]
    assert all(problem.fix for problem in problems)
    assert rule(config_with(satisfying)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "violating", "message", "satisfying"), CASES, ids=IDS)
def test_a_trace_changes_no_result_and_contains_keys(
    name: str, violating: Values, message: str, satisfying: Values
) -> None:
    rule = find_rule(name)
    for values in (violating, satisfying):
        problems, read = rule.trace(config_with(values))
        assert problems == rule(config_with(values))
        assert read
        assert read <= keys().keys() | PASSED_ON


@pytest.mark.slow
@pytest.mark.parametrize(("name", "violating", "message", "satisfying"), CASES, ids=IDS)
def test_a_rule_is_ignored_exactly_if_a_key_that_it_reads_is_broken(
    name: str, violating: Values, message: str, satisfying: Values
) -> None:
    config = config_with(violating)
    problems, read = find_rule(name).trace(config)
    own = set(problems) - set(others(config, name))
    traces = [each.trace(config) for each in RULES]
    for key in read:
        for broken in (key, key.partition(".")[0], f"{key}.entry"):
            assert not own & set(find_unaffected(traces, [broken]))
    unread = [key for key in keys() if not any(f"{key}.".startswith(f"{path}.") for path in read)]
    assert set(problems) <= set(find_unaffected(traces, unread))
    assert find_unaffected(traces, unread) == check_rules(config, broken=unread)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "violating", "message", "satisfying"), CASES, ids=IDS)
def test_the_page_of_rules_lists_the_keys_of_every_case(
    name: str, violating: Values, message: str, satisfying: Values
) -> None:
    rule = find_rule(name)
    for values in (violating, satisfying):
        assert rule.trace(config_with(values))[1] <= set(keys_read(rule))


def others(config: RunConfig, name: str) -> list[Problem]:
    """Problems of all other rules; some of them have the same text."""
    return [problem for each in RULES if each.name != name for problem in each(config)]


def test_broken_keys_and_groups() -> None:
    config = config_with({"batch.global_batch_size": 48})
    assert check_rules(config, broken=["batch.rollout_batch_size"]) == []
    assert check_rules(config, broken=["batch"]) == []
    assert check_rules(config, broken=[""]) == []
    assert len(check_rules(config, broken=["batch.micro_batch_size", "algo"])) == 1


def test_a_key_counts_as_read_only_in_the_branch_that_reads_it() -> None:
    @rule
    def example(config: RunConfig) -> list[Problem]:
        if config.algo.mis.low is None:
            return []
        return [Problem(path="algo.eps_clip", rule="be 0", value=str(config.algo.eps_clip))]

    assert example.trace(valid_config()) == ([], {"algo.mis.low"})
    problems, read = example.trace(config_with({"algo.mis.low": 0.5}))
    assert (len(problems), read) == (1, {"algo.mis.low", "algo.eps_clip"})


def test_a_trace_contains_every_key_that_is_read() -> None:
    paths = list(all_paths(valid_config()))

    @rule
    def read_all(config: RunConfig) -> list[Problem]:
        for path in paths:
            attrgetter(path)(config)
        return []

    assert read_all.trace(valid_config())[1] == set(paths)


def test_a_trace_does_not_allow_reads_that_it_cannot_record() -> None:
    @rule
    def read_unrecorded(config: RunConfig) -> list[Problem]:
        return [Problem(path=name, rule="", value="") for name in vars(config.model)]

    with pytest.raises(TypeError, match="__dict__"):
        read_unrecorded.trace(valid_config())


def all_paths(config: Any, prefix: str = "") -> Iterator[str]:
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from all_paths(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def test_the_valid_config_has_the_defaults_of_algo() -> None:
    assert valid_config().algo == AlgoConfig()
