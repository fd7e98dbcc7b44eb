"""Custom prompt sources: created with the config and the tokenizer, and checked before the run starts."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlscale.config import RunConfig, load_config
from rlscale.config.user_functions import check_hooks
from rlscale.data.prompts import FilePromptSource
from rlscale.data.source import build_prompt_source
from rlscale.errors import ConfigError, DataError

MODULE = """
from rlscale.types import Prompt

class Counting:
    def __init__(self, config, tokenizer, custom):
        self.position, self.step, self.tokenizer = 0, custom.get("step", 1), tokenizer
        self.size = config.batch.rollout_batch_size

    def take(self, num_prompts):
        rows = range(self.position, self.position + num_prompts * self.step, self.step)
        self.position += num_prompts * self.step
        texts = [f"{row}+0=" for row in rows]
        return [Prompt(index=i, text=t, token_ids=tuple(self.tokenizer.encode(t))) for i, t in zip(rows, texts)]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

class Half:
    def __init__(self, config, tokenizer): ...
    def take(self, num_prompts): return []

class Wrong(Counting):
    def take(self, num_prompts):
        found = super().take(num_prompts)
        kind = self.kind
        return {
            "none": None,
            "few": found[1:],
            "texts": [prompt.text for prompt in found],
            "empty": [Prompt(index=0, text="", token_ids=())] * num_prompts,
            "floats": [Prompt(index=0, text="", token_ids=(1.5,))] * num_prompts,
        }[kind]

    def state_dict(self):
        return {"position": (1, 2)} if self.kind == "none" else {3: 4}

def wrong(config, tokenizer, custom):
    source = Wrong(config, tokenizer, {})
    source.kind = custom["kind"]
    return source

def no_arguments(): ...

number = 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_sources_for_test.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != os.getcwd()])
    monkeypatch.delitem(sys.modules, "user_sources_for_test", raising=False)
    return "user_sources_for_test"


def config(module: str, name: str, *words: str) -> RunConfig:
    given = (f"data.data_source_path={module}:{name}", "data.rollout_global_dataset=false", "data.prompt_data=null")
    return load_config([*given, *words])


def test_a_custom_source_serves_the_prompts(module: str, tokenizer: PreTrainedTokenizerBase) -> None:
    source = build_prompt_source(config(module, "Counting", "custom.step=10"), tokenizer)
    assert [prompt.text for prompt in source.take(3)] == ["0+0=", "10+0=", "20+0="]
    state: Mapping[str, Any] = source.state_dict()
    source.take(1)
    source.load_state_dict(state)
    assert source.take(1)[0].text == "30+0="
    assert check_hooks(config(module, "Counting")) == []


def test_without_a_custom_source_prompts_are_read_from_the_file(tokenizer: PreTrainedTokenizerBase) -> None:
    assert isinstance(build_prompt_source(load_config([]), tokenizer), FilePromptSource)
    assert check_hooks(load_config([])) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "data.data_source_path must be importable"),
        ("number", "data.data_source_path must be a class or a function that returns a data source"),
        ("no_arguments", "data.data_source_path must be callable with (config, tokenizer)"),
    ],
)
def test_an_unusable_source_is_an_error_at_load(module: str, name: str, message: str) -> None:
    (problem,) = check_hooks(config(module, name))
    assert str(problem).startswith(message)


def test_a_source_without_its_methods_is_an_error(module: str, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match="add state_dict, load_state_dict as in"):
        build_prompt_source(config(module, "Half"), tokenizer)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("none", "got NoneType"),
        ("few", "got 1; continue with the next epoch at the end of one"),
        ("texts", "got str at index 0"),
        ("empty", r"got token_ids \(\) at index 0; return at least one token id"),
        ("floats", r"got token_ids \(1\.5,\) at index 0"),
    ],
)
def test_results_of_a_custom_source_are_checked(
    module: str, kind: str, message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    source = build_prompt_source(config(module, "wrong", f"custom.kind={kind}"), tokenizer)
    rule = r"take\(2\) of user_sources_for_test:wrong must return 2 prompts \(rlscale\.types\.Prompt\), "
    with pytest.raises(DataError, match=rule + message):
        source.take(2)
    with pytest.raises(DataError, match=r"state_dict\(\) of user_sources_for_test:wrong must return a dict of JSON"):
        source.state_dict()
