"""Corrections of unparsable overrides can be parsed and mean what was typed."""

import re
import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlscale.config.hydra.grammar import explain_value, is_parsable
from rlscale.config.keys import keys
from rlscale.config.problems import default_fix

AWKWARD = st.text(alphabet="ab1,=:;@#%$*\\/ (){}[]<>'\"&|~^", min_size=1, max_size=8)


def proposed(fix: str) -> object:
    (word,) = shlex.split(fix.removeprefix("write "))
    return OverridesParser.create().parse_override(word).value()


@given(AWKWARD)
@settings(max_examples=150, deadline=None)
@example("${")
@example('$"{')
@example("'${")
@pytest.mark.slow
def test_the_proposed_quotes_keep_the_text(value: str) -> None:
    if is_parsable(f"run.name={value}"):
        return
    rule, fix = explain_value("run.name", value, keys()["run.name"])
    assert fix, (rule, value)
    if fix == default_fix(keys()["run.name"]):
        # An interpolation is one in quotes, too, so that no override keeps a text with an open one.
        assert "${" in re.sub("['\"]", "", value), rule
    elif rule.startswith("be in quotes"):
        assert proposed(fix) == value
    else:
        assert str(proposed(fix)) == value.replace(re.findall("quote (.)", rule)[0], "")


@given(st.lists(st.sampled_from(["a", "</s>", "1", "b c", "x=y", "#"]), min_size=1, max_size=3), st.sampled_from("]x"))
@settings(max_examples=60, deadline=None)
def test_a_proposed_list_keeps_the_entries(entries: list[str], end: str) -> None:
    value = "[" + ",".join(entries) + ("]" if end == "]" else "")
    if is_parsable(f"rollout.stop={value}"):
        return
    _, fix = explain_value("rollout.stop", value, keys()["rollout.stop"])
    found = proposed(fix)
    assert isinstance(found, list) and [str(entry) for entry in found] == entries


@pytest.mark.parametrize(
    ("path", "value"), [("optim.lr", "[1e-5"), ("train.dtype", "[float32"), ("algo.use_tis", "{x")]
)
def test_quotes_are_proposed_for_strings_only(path: str, value: str) -> None:
    assert explain_value(path, value, keys()[path]) == (f"be {keys()[path].type_text}", default_fix(keys()[path]))


@pytest.mark.parametrize("value", ["${", "[", '"', "[${", "{a", "a='", "((", "1,,2]"])
def test_every_key_has_a_fix_for_an_unparsable_value(value: str) -> None:
    assert not is_parsable(f"x={value}")
    assert all(explain_value(path, value, key)[1] for path, key in keys().items())
    assert explain_value("data.apply_chat_template_kwargs.a", value, None)[1]
