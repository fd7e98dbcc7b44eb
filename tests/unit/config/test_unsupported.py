"""Unsupported values are rejected with an alternative."""

from typing import Any

import pytest

from rlscale.config import load_config_with_notes
from rlscale.config.keys import Key, keys
from rlscale.config.unsupported import MEGATRON_GAPS, BackendGap, supported_values
from tests.unit.config.config_errors import config_errors, only_error

CASES = [
    (
        "optim.name=deepspeed_cpu_adam train=megatron",
        "optim.name must be adam or muon with train.backend=megatron (not supported yet), got deepspeed_cpu_adam; set "
        "megatron.optimizer_cpu_offload=true instead, or choose train=fsdp",
    ),
]


@pytest.mark.parametrize(("word", "message"), CASES, ids=[word for word, _ in CASES])
def test_an_unsupported_value_is_rejected(word: str, message: str) -> None:
    assert message in only_error(word.split())


def another_value(key: Key) -> str:
    """A value that the key's type and constraints allow and that is not built."""
    built = supported_values()[key.path].values
    if key.is_mapping:
        return "{a: b}"
    texts = {bool: ["true", "false"], str: ["pkg.module:name"], list[str]: ["[a:b]"], float: ["0.5"], int: ["2"]}
    candidates: list[str] = list(key.choices) or texts[key.type]
    return next(text for text in candidates if text not in [str(value).lower() for value in built])


@pytest.mark.parametrize("path", supported_values())
def test_setting_an_unsupported_key_is_an_error_or_has_no_effect(path: str) -> None:
    word = f"{path}={another_value(keys()[path])}"
    found = [text for text in config_errors(word) if text.startswith(f"{path} must be ")]
    if found:
        assert "(not supported yet: " in found[0] and "(command line)" in found[0]
    else:
        assert any(text.startswith(f"{path} is ignored: ") for text in load_config_with_notes([word]).warnings)


def test_every_entry_has_values_of_its_key() -> None:
    for path, built in supported_values().items():
        key = keys()[path]
        kind: Any = dict if key.is_mapping else list if key.type in (list[str], list[int]) else key.type
        assert key.default in built.values, path
        assert all(value is None or isinstance(value, kind) for value in built.values), path


WITH_MEGATRON = {"optim.name": "optim.name=deepspeed_cpu_adam"}


@pytest.mark.parametrize("lack", MEGATRON_GAPS, ids=lambda lack: str(lack.path))
def test_gaps_of_megatron_are_rejected_with_megatron_only(lack: BackendGap) -> None:
    words = ["experiment=quickstart", *WITH_MEGATRON[lack.path].split()]
    message = f"{lack.path} must {lack.rule}"
    assert any(
        text.startswith(message) and "(not supported yet)" in text for text in config_errors(*words, "train=megatron")
    )
    assert not any(text.startswith(message) for text in config_errors(*words))
