"""Refused arguments of SGLang and Megatron-core exist there and have values of their types."""

import json
from typing import Any

import pytest

from rlscale.config.library_limits import LIMITS
from rlscale.config.passthrough import megatron_args, sglang_args
from rlscale.config.passthrough.field_types import fits
from rlscale.config.passthrough.recorded import read_recorded
from rlscale.config.rules.library_args import REFUSED_BY_ENGINES, REFUSED_BY_TRAINERS
from tests.unit.config.config_errors import config_errors

RECORDED = {
    "sglang": read_recorded(sglang_args.RECORDED).types,
    "megatron": read_recorded(megatron_args.RECORDED).types,
}
REFUSED = {
    **{f"sglang.{name}": right for name, (right, _) in REFUSED_BY_ENGINES.items()},
    **{f"megatron.{name}": right for name, (right, _) in REFUSED_BY_TRAINERS.items()},
    **{path: limit.value for path, limit in LIMITS.items()},
}
GROUPS = {"sglang": ["rollout=sglang"], "megatron": ["train=megatron"]}


def another_value(kind: str, right: Any) -> str:
    """A value of the library's type that is refused, as on a command line."""
    texts = ("true", "2", "0.5", "[2,2]", "{a: b}", "decode", "prefill", "verifier", "dsa", "hybrid", "e2m1", "scale")
    texts += ("local", "transformer_engine", "/file")
    values: dict[str, Any] = {"true": True, "2": 2, "0.5": 0.5, "[2,2]": [2, 2], "{a: b}": {"a": "b"}}
    return next(text for text in texts if fits(values.get(text, text), kind) and values.get(text, text) != right)


@pytest.mark.parametrize("path", REFUSED)
def test_the_library_has_the_argument_and_its_value(path: str) -> None:
    group, _, name = path.partition(".")
    kind = RECORDED[group][name]
    assert REFUSED[path] is None or fits(REFUSED[path], kind)
    assert REFUSED[path] is not None or kind.endswith("null")


@pytest.mark.slow
@pytest.mark.parametrize("path", REFUSED)
def test_another_value_is_an_error_and_the_right_one_is_not(path: str) -> None:
    group, _, name = path.partition(".")
    word = f"{path}={another_value(RECORDED[group][name], REFUSED[path])}"
    (message,) = [text for text in config_errors(word, *GROUPS[group]) if text.startswith(f"{path} must be ")]
    assert "remove it" in message and "(command line" in message
    right = json.dumps(REFUSED[path])  # with quotes around a text, since null alone is no text
    assert not any(path in text for text in config_errors(f"{path}={right}", *GROUPS[group]))
