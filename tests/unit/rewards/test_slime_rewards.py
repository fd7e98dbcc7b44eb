import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlscale.errors import ConfigError
from rlscale.plugins.sample_view import DocumentSample
from rlscale.rewards.slime_rewards import async_rm, batched_async_rm

MODULE = """
async def of_all(args, samples, **kwargs):
    return [float(sample.index) for sample in samples]

def of_one(args, sample, **kwargs):
    return sample.index + args.bonus
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slime_rewards_for_test.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "slime_rewards_for_test", raising=False)


def args(**values: Any) -> Any:
    return SimpleNamespace(**{"custom_rm_path": None, "rm_type": "exact_match", "bonus": 0.5} | values)


def samples() -> list[DocumentSample]:
    return [
        DocumentSample(index=i, tokens=[1, 2, 3], response=r, response_length=1, label="2") for i, r in enumerate("23")
    ]


def test_a_built_in_reward_has_the_type_of_the_run_or_of_the_row() -> None:
    assert asyncio.run(batched_async_rm(args(), samples())) == [1.0, 0.0]
    (sample, _) = samples()
    sample.metadata = {"rm_type": "boxed_exact_match"}
    assert asyncio.run(async_rm(args(), sample)) == 0.0
    sample.response = r"\boxed{2}"
    assert asyncio.run(async_rm(args(), sample)) == 1.0


def test_a_custom_reward_takes_precedence() -> None:
    custom = args(custom_rm_path="slime_rewards_for_test.of_all")
    assert asyncio.run(batched_async_rm(custom, samples())) == [0.0, 1.0]
    (_, sample) = samples()
    sample.custom_rm_path = "slime_rewards_for_test.of_one"
    assert asyncio.run(async_rm(args(), sample)) == 1.5


def test_a_run_without_a_reward_type_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"reward\.type must be set"):
        asyncio.run(async_rm(args(rm_type=None), samples()[0]))
