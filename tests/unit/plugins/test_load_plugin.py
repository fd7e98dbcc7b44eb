import asyncio
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlscale.errors import ConfigError
from rlscale.plugins.args_view import Args
from rlscale.plugins.load_plugin import load_plugin
from tests.unit.config.rules.valid_config import config_with
from tests.unit.plugins.document_cases import make_group

MODULE = """
def score(sample):
    return len(sample.response) + 0.5

def by_name(*, sample, custom):
    return custom["bonus"]

def document_score(args, sample, **kwargs):
    sample.metadata["graded_by"] = args.grader
    return {"exact": float(sample.response == sample.label), "length": sample.response_length}

async def later(args, sample, **kwargs):
    sample.metadata["graded_by"] = args.grader
    return 2.0

def of_group(args, samples, **kwargs):
    return [sample.index for sample in samples]

def keep(group):
    return "flat"

def document_keep(args, samples, **kwargs):
    return samples[0].reward > args.n_samples_per_prompt

def with_values(args, samples, custom):
    return custom["bonus"] > samples[0].reward
"""
CUSTOM = {"grader": "mine", "bonus": 4.0}
ARGS = Args(config_with({"custom": CUSTOM}))


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "plugins_for_test.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plugins_for_test", raising=False)
    import plugins_for_test  # type: ignore[import-not-found]

    return plugins_for_test  # type: ignore[no-any-return]


def load(key: str, name: str) -> Any:
    return load_plugin(key, f"plugins_for_test:{name}", args=ARGS, custom=CUSTOM)


def test_a_reward_is_called_in_its_form() -> None:
    (sample,) = make_group(0.0).samples
    assert load("reward.custom_path", "score")(sample) == 1.5
    assert load("reward.custom_path", "by_name")(sample) == 4.0
    assert sample.metadata == {}
    assert load("reward.custom_path", "document_score")(sample) == {"exact": 1.0, "length": 2}
    assert sample.metadata == {"graded_by": "mine"}


def test_an_async_reward_in_slimes_form_is_awaited() -> None:
    (sample,) = make_group(0.0).samples
    assert asyncio.run(load("reward.custom_path", "later")(sample)) == 2.0
    assert sample.metadata == {"graded_by": "mine"}


def test_a_group_reward_in_slimes_form_gets_a_list() -> None:
    assert load("reward.custom_path", "of_group")(make_group(0.0, 0.0, index=2).samples) == [4, 5]


def test_an_adapted_function_can_be_sent_to_a_process() -> None:
    reward = pickle.loads(pickle.dumps(load("reward.custom_path", "document_score")))
    assert reward(make_group(0.0).samples[0])["exact"] == 1.0


def test_a_filter_is_called_in_its_form() -> None:
    key = "sampling.dynamic_filter_path"
    assert load(key, "keep")(make_group(1.0)) == "flat"
    assert load(key, "document_keep")(make_group(ARGS.n_samples_per_prompt + 1.0)) is True
    assert load(key, "document_keep")(make_group(1.0)) == "document_keep"
    assert load(key, "with_values")(make_group(3.0)) is True


def test_a_function_in_slimes_form_without_args_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward.custom_path must be callable with \(sample\), got plugins_for_test"):
        load_plugin("reward.custom_path", "plugins_for_test:document_score", args=None, custom={})
