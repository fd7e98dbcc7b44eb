"""User functions in a Megatron-core trainer: the examples of the docs, called on two pipeline ranks."""

import re
from pathlib import Path
from typing import Any

import pytest

from rlscale.config import TrainBackendName
from rlscale.config.user_functions import check_hooks
from tests.ranks.training.launch import report, run_ranks
from tests.unit.config.rules.valid_config import config_with
from tests.unit.training.rollouts import tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "your-own-megatron.md"
EXAMPLES = ["my_init", "my_weights", "my_decay", "my_model"]

RECORDED = """
import my_decay
import my_model
import my_weights

calls = []

def init(megatron, custom):
    calls.append(["init", megatron.pipeline_model_parallel_size, custom["decay_steps"]])

def before_logprobs(model, role):
    my_weights.my_weights(model, role)
    calls.append(["logprobs", role, len(model)])

def before_train_step(rollout_id, step_id, model, optimizer, custom):
    my_decay.my_decay(rollout_id, step_id, model, optimizer, custom)
    decays = sorted({group["weight_decay"] for group in optimizer.param_groups})
    calls.append(["step", rollout_id, step_id, len(model), decays])

def provider(build, pre_process, post_process, vp_stage):
    calls.append(["model", pre_process, post_process, vp_stage])
    return my_model.my_model(build, pre_process, post_process, vp_stage)

def no_model(build, pre_process, post_process, vp_stage):
    return build.arguments["config"]
"""


def write_examples(folder: Path) -> None:
    texts = re.findall(r"```python\n(# (\w+)\.py.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for _, name in texts] == EXAMPLES
    for text, name in [*texts, (RECORDED, "recorded_megatron_hooks")]:
        (folder / f"{name}.py").write_text(text)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Reports of two ranks, which run once for all tests of this module."""
    folder = tmp_path_factory.mktemp("hooks")
    write_examples(folder)
    model = tiny_model(folder / "models", num_layers=2, tied=False)
    run_ranks("tests.ranks.training.megatron_hook_ranks", model, str(folder))
    return [report(folder, rank) for rank in range(2)]


def test_each_function_gets_the_documented_arguments(reports: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(reports):
        assert found["calls"] == [
            ["init", 2, 10],
            ["model", rank == 0, rank == 1, None],
            ["logprobs", "policy", 1],
            ["logprobs", "reference", 1],
            ["step", 4, 0, 1, [0.0]],
            ["logprobs", "policy", 1],
            ["logprobs", "reference", 1],
            ["step", 5, 1, 1, [pytest.approx(0.01)]],
        ]


def test_weights_frozen_by_the_model_provider_do_not_change(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["unchanged"] == ["model.embed_tokens.weight"]


def test_a_provider_must_return_a_model(reports: list[dict[str, Any]]) -> None:
    assert reports[0]["no model"] == (
        "model.custom_model_provider_path must return a MegatronDecoder, got TransformerConfig from "
        "recorded_megatron_hooks:no_model; return the result of build(...), or an instance of a subclass of build.kind"
    )


@pytest.mark.parametrize(
    ("key", "example"),
    [
        ("megatron.init_hook_path", "my_init"),
        ("megatron.before_log_prob_hook_path", "my_weights"),
        ("megatron.before_train_step_hook_path", "my_decay"),
        ("model.custom_model_provider_path", "my_model"),
    ],
)
def test_signatures_are_checked_before_anything_starts(
    key: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_examples(tmp_path)
    monkeypatch.chdir(tmp_path)
    on = {"train.backend": TrainBackendName.megatron}
    assert check_hooks(config_with({**on, key: f"{example}:{example}"})) == []
    wrong = next(each for each in EXAMPLES if each != example)
    (problem,) = check_hooks(config_with({**on, key: f"{wrong}:{wrong}"}))
    assert problem.path == key and problem.rule.startswith("be callable with (")
    assert check_hooks(config_with({"train.backend": TrainBackendName.fsdp, key: "gone_for_test:f"})) == []


def test_every_group_has_the_configured_timeout(reports: list[dict[str, Any]]) -> None:
    assert all(found["timeouts"] for found in reports)
