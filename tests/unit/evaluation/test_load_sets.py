"""Evaluation sets from the file `eval.config`: every key of a set changes its prompts, sampling or reward."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlscale import load_config
from rlscale.config import RunConfig
from rlscale.driver.preflight.eval_checks import check_eval_functions, check_eval_sets
from rlscale.driver.prepared_run import PreparedRun, prepare_run
from rlscale.evaluation.load_sets import EvalSet
from rlscale.models.tiny import build_model
from rlscale.rewards import RewardSpec

ROW = {"prompt": "1+1=", "question": "2+2=", "label": "2", "answer": "4", "metadata": {"k": 1}, "extra": {"k": 2}}


def config_of(folder: Path, entry: dict[str, Any], *overrides: str) -> RunConfig:
    """The quickstart with one evaluation set of three rows."""
    (folder / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 3)
    (folder / "chat.jsonl").write_text(
        json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}) + "\n"
    )
    text = yaml.safe_dump({"eval": {"datasets": {"own": {"path": str(folder / "rows.jsonl"), **entry}}}})
    (folder / "sets.yaml").write_text(text)
    files = (
        f"data.prompt_data={folder}/rows.jsonl",
        f"eval.config={folder}/sets.yaml",
        "data.apply_chat_template=false",
    )
    return load_config(["experiment=quickstart", *files, "model.warmup_experiment=null", *overrides])


def prepared(folder: Path, entry: dict[str, Any], *overrides: str) -> PreparedRun:
    config = config_of(folder, entry, *overrides)
    return prepare_run(config, str(build_model(config.model, folder)))


def loaded(folder: Path, entry: dict[str, Any], *overrides: str) -> EvalSet:
    (found,) = prepared(folder, entry, *overrides).eval_sets
    return found


def test_a_set_without_settings_has_those_of_the_run(tmp_path: Path) -> None:
    found = loaded(tmp_path, {}, "rollout.stop=['x']", "eval.temperature=0.3")
    assert (found.name, found.num_samples, len(found.prompts), found.reward) == ("own", 1, 3, None)
    assert found.prompts[0].text == "1+1=" and found.prompts[0].metadata == {"k": 1}
    assert found.params.stop == ("x",) and found.params.temperature == 0.3
    assert found.about is not None and found.about["reward"] == "exact_match"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("temperature", 0.1, 0.1),
        ("top_p", 0.5, 0.5),
        ("top_k", 3, 3),
        ("min_new_tokens", 2, 2),
        ("stop", ["</a>", "b"], ("</a>", "b")),
        ("stop", "b", ("b",)),
        ("stop_token_ids", [5, 6], (5, 6)),
        ("repetition_penalty", 1.2, 1.2),
        ("skip_special_tokens", True, True),
        ("no_stop_trim", True, True),
    ],
)
def test_sampling_of_a_set_reaches_its_requests(tmp_path: Path, key: str, value: Any, expected: Any) -> None:
    params, plain = loaded(tmp_path, {key: value}).params, loaded(tmp_path, {}).params
    assert getattr(params, key) == expected != getattr(plain, key)


def test_lengths_numbers_and_keys_of_a_set(tmp_path: Path) -> None:
    entry = {"max_response_len": 2, "n_samples_per_eval_prompt": 5, "max_examples": 2}
    found = loaded(tmp_path, {**entry, "input_key": "question", "label_key": "answer", "metadata_key": "extra"})
    assert (found.params.max_new_tokens, found.num_samples, len(found.prompts)) == (2, 5, 2)
    prompt = found.prompts[0]
    assert (prompt.text, prompt.label, prompt.metadata) == ("2+2=", "4", {"k": 2})


def test_metadata_of_a_set_replaces_that_of_rows_and_names_the_reward(tmp_path: Path) -> None:
    found = loaded(tmp_path, {"rm_type": "f1", "metadata_overrides": {"k": 9, "split": "test"}})
    assert found.prompts[0].metadata == {"k": 9, "split": "test", "rm_type": "f1"}
    assert found.reward is None, "the built-in reward of the run follows rm_type"


def test_the_chat_template_of_a_set(tmp_path: Path) -> None:
    entry = {"path": str(tmp_path / "chat.jsonl"), "apply_chat_template": True}
    assert loaded(tmp_path, entry).prompts[0].text == "<|user|>1+1=<|assistant|>"


def test_a_set_with_its_own_function_has_its_own_reward_and_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def score(sample):\n    return 1.0\n\nasync def generate(trajectory, session):\n    pass\n"
    (tmp_path / "own_functions.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    entry = {"custom_rm_path": "own_functions:score", "custom_generate_function_path": "own_functions:generate"}
    config = config_of(tmp_path, entry)
    assert check_eval_sets(config) == check_eval_functions(config) == []
    found = loaded(tmp_path, entry)
    assert isinstance(found.reward, RewardSpec) and found.reward.config.custom_path == "own_functions:score"
    assert found.generate_path == "own_functions:generate"


def test_keys_that_slime_never_reads_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded(tmp_path, {"eval_task_timeout": 60})
    assert "eval_task_timeout of the set own in eval.config is ignored" in caplog.text


@pytest.mark.parametrize(
    ("entry", "overrides", "message"),
    [
        (
            {"custom_rm_path": "nowhere:score"},
            (),
            "custom_rm_path of the set own of eval.config must be imp",
        ),
        (
            {"custom_generate_function_path": "json:dumps"},
            (),
            "custom_generate_function_path of the set own of eval.config must be callable",
        ),
        ({"rm_type": "remote_rm"}, (), "reward.url must be set with remote_rm"),
        ({"rm_type": "judge"}, (), "reward.engine.num_gpus must be at least 1 with judge"),
        (
            {"rm_type": "f1"},
            ("data.label_key=null", "eval.label_key=null", "reward.type=random"),
            "have a label_key for",
        ),
        ({"path": "gone.jsonl"}, (), "eval.config must name a file that exists, got gone.jsonl"),
        ({"input_key": "nothing"}, (), "eval.config must name a file whose rows can be used"),
    ],
)
def test_problems_of_a_set_are_found_before_a_run(
    tmp_path: Path, entry: dict[str, Any], overrides: tuple[str, ...], message: str
) -> None:
    config = config_of(tmp_path, entry, *overrides)
    (problem,) = [*check_eval_sets(config), *check_eval_functions(config)]
    assert message in str(problem) and "\n" not in str(problem)
