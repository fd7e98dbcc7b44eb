"""The page for users of slime matches the table of arguments."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlscale.config import load_config
from rlscale.config.keys import keys
from rlscale.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_from_slime", ROOT / "scripts" / "make_from_slime.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["make_from_slime"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script: ModuleType) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.make_page(), "run python scripts/make_from_slime.py"


def test_every_argument_is_on_it(script: ModuleType) -> None:
    arguments = script.read_arguments()
    page = script.make_page()
    assert len(arguments) > 180
    assert all(f"| `{each.flag}` | `{each.key.path}" in page for each in arguments)
    assert {each.key.path for each in arguments} <= keys().keys()


def test_flags_become_words(script: ModuleType) -> None:
    flags = (
        "--colocate --disable-rewards-normalization --rollout-stop a b --lr 1e-6 --apply-chat-template-kwargs '{a: 1}'"
    )
    assert script.translate(flags, script.read_arguments()) == [
        "cluster.colocate=true",
        "algo.rewards_normalization=false",
        "rollout.stop=[a,b]",
        "optim.lr=1e-6",
        "data.apply_chat_template_kwargs={a: 1}",
    ]


def test_the_example_is_a_configuration(script: ModuleType) -> None:
    config = load_config(["experiment=null", *script.translate(script.EXAMPLE, script.read_arguments())])
    assert config.batch.global_batch_size == 256 and config.cluster.rollout_num_gpus == 8
    assert config.algo.grpo_std_normalization is False and config.rollout.engine == "sglang"


def test_a_flag_as_slime_has_it_is_refused_with_the_key() -> None:
    with pytest.raises(ConfigError, match=r"did you mean batch\.rollout_batch_size=32\?"):
        load_config(["--rollout-batch-size=32"])
