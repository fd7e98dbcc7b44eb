"""Data sets of an evaluation: from pairs, or from a file with its own sampling."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlscale.config import DataConfig, EvalConfig, RewardConfig, RewardType, load_config
from rlscale.config.engine_models import read_engine_file
from rlscale.config.load import load_config_with_notes
from rlscale.config.resolve.eval_sets import eval_sets
from rlscale.errors import ConfigError
from tests.unit.config.config_errors import config_errors

TWO = """
eval:
  defaults: {n_samples_per_prompt: 4, temperature: 0.6}
  datasets:
    - {name: hard, path: hard.jsonl, max_response_len: 99, reward_key: strict}
    - {name: easy, path: easy.jsonl, n_samples_per_prompt: 1, temperature: 0}
"""


def write(folder: Path, text: str) -> str:
    path = folder / "eval.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_each_set_has_the_defaults_its_own_values_and_those_of_the_group(tmp_path: Path) -> None:
    config = EvalConfig(config=write(tmp_path, TWO), top_p=0.9, max_response_len=7, prompt_data=["ignored.jsonl"])
    hard, easy = eval_sets(config)
    assert (hard.name, hard.path, easy.name, easy.path) == ("hard", "hard.jsonl", "easy", "easy.jsonl")
    assert (hard.eval.n_samples_per_prompt, easy.eval.n_samples_per_prompt) == (4, 1)
    assert (hard.eval.temperature, easy.eval.temperature) == (0.6, 0)
    assert (hard.eval.max_response_len, easy.eval.max_response_len) == (99, 7)
    assert (hard.eval.reward_key, easy.eval.reward_key) == ("strict", None)
    assert hard.eval.top_p == easy.eval.top_p == 0.9


def test_pairs_and_one_path_alone() -> None:
    both = eval_sets(EvalConfig(prompt_data=["a", "a.jsonl", "b", "b.jsonl"]))
    assert [(each.name, each.path) for each in both] == [("a", "a.jsonl"), ("b", "b.jsonl")]
    assert [(each.name, each.path) for each in eval_sets(EvalConfig(prompt_data=["a.jsonl"]))] == [("eval", "a.jsonl")]
    assert eval_sets(EvalConfig()) == []


def test_a_file_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    readers: tuple[Callable[[str], object], ...] = (lambda name: eval_sets(EvalConfig(config=name)), read_engine_file)
    for path, cause in ((tmp_path / "pipe.yaml", "it is no regular file"), (tmp_path, "it is a folder")):
        for read in readers:
            with pytest.raises(ConfigError, match=f"must name a readable YAML file, got {path}; {cause}"):
                read(str(path))
        with pytest.raises(
            ConfigError, match=f"custom_config_path must name a readable YAML file, got {path}; {cause}"
        ):
            load_config([f"custom_config_path={path}"])


def test_a_file_is_resolved_with_the_rollouts_own_sampling(tmp_path: Path) -> None:
    loaded = load_config_with_notes([f"eval.config={write(tmp_path, TWO)}", "eval.n_samples_per_prompt=3"])
    assert "eval.prompt_data is ignored: eval.config is set and takes precedence" in loaded.warnings
    hard, _ = eval_sets(loaded.config.eval)
    assert hard.eval.top_k == loaded.config.rollout.top_k and hard.eval.n_samples_per_prompt == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "eval.config must name a file with eval.datasets, a list or a mapping by name, got"),
        ("eval: {datasets: []}", "eval.config must name a file with eval.datasets, a list or a mapping by name, got"),
        (TWO.replace("defaults", "default"), "got eval.default in"),
        (TWO.replace("temperature: 0.6", "temprature: 0.6"), "eval.defaults.temprature in"),
        (TWO.replace("name: hard, ", ""), "eval.config must have a string as eval.datasets[0].name, got null in"),
        (
            TWO.replace("temperature: 0}", "temperature: -1}"),
            "eval.datasets[1].temperature of eval.config must be >= 0, got",
        ),
        (TWO.replace("name: easy", "name: hard"), "eval.config must give each set a unique name, got hard twice in"),
        ("eval: {datasets: [x]}", "eval.config must have a mapping as eval.datasets[0], got x in"),
    ],
)
def test_problems_of_a_file_are_reported(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        eval_sets(EvalConfig(config=path))
    assert any(message in str(problem) for problem in caught.value.problems), str(caught.value)
    assert all(problem.fix for problem in caught.value.problems)


def test_misspelt_keys_get_suggestions_and_are_reported_together(tmp_path: Path) -> None:
    text = TWO.replace("temperature: 0.6", "temprature: 0.6").replace("max_response_len", "max_respnse_len")
    found = config_errors(f"eval.config={write(tmp_path, text)}", "optim.lr=-1")
    assert any("did you mean temperature?" in text for text in found)
    assert any("did you mean max_response_len?" in text for text in found)
    assert any(text.startswith("optim.lr") for text in found)


def test_the_file_is_enough_data_for_an_evaluation(tmp_path: Path) -> None:
    config = load_config([f"eval.config={write(tmp_path, TWO)}", "eval.prompt_data=null", "eval.interval=1"])
    assert [each.name for each in eval_sets(config.eval)] == ["hard", "easy"]


SLIME = """
eval:
  defaults:
    max_response_len: 16384
    top_p: 0.7
  datasets:
    - name: aime
      path: /root/aime-2024/aime-2024.jsonl
      rm_type: deepscaler
      n_samples_per_eval_prompt: 16
    - name: gpqa    # a comment
      path: /root/gpqa/gpqa_eval.jsonl
      rm_type: gpqa
      n_samples_per_eval_prompt: 2
    - name: ifbench
      path: /root/ifbench/IFBench_eval.jsonl
      rm_type: ifbench
      n_samples_per_eval_prompt: 1
"""
"""The form of the only public file, `examples/eval_multi_task/multi_task.yaml` of slime."""


def test_the_public_file_of_slime_loads_as_it_is(tmp_path: Path) -> None:
    sets = eval_sets(EvalConfig(config=write(tmp_path, SLIME)))
    assert [each.name for each in sets] == ["aime", "gpqa", "ifbench"]
    assert [str(each.own.rm_type) for each in sets] == ["deepscaler", "gpqa", "ifbench"]
    assert [each.eval.n_samples_per_prompt for each in sets] == [16, 2, 1]
    assert {(each.eval.max_response_len, each.eval.top_p) for each in sets} == {(16384, 0.7)}


def test_every_key_that_slime_accepts_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAL_FOLDER", "/sets")
    text = """
defaults: {n_samples_per_eval_prompt: 2, stop_token_ids: [11], eval_task_timeout: 60, temperature: 0.5}
datasets:
  aime:
    path: ${oc.env:EVAL_FOLDER}/a.jsonl
    custom_rm_path: my.rewards.score
    custom_generate_function_path: my.tools.generate
    metadata_key: extra
    metadata_overrides: {split: test}
    multimodal_keys: null
    apply_chat_template: true
    apply_chat_template_kwargs: {enable_thinking: false}
    temperature: null
    stop: </answer>
    repetition_penalty: 1.05
    skip_special_tokens: false
    no_stop_trim: true
    app_service: http://localhost:1
    tool_key: tools
  easy:
    name: renamed
    path: b.jsonl
"""
    first, second = eval_sets(EvalConfig(config=write(tmp_path, text), temperature=0.9))
    assert (first.name, first.path, second.name) == ("aime", "/sets/a.jsonl", "renamed")
    own = first.own
    assert (own.stop, own.stop_token_ids, own.repetition_penalty) == (["</answer>"], [11], 1.05)
    assert (own.skip_special_tokens, own.no_stop_trim) == (False, True)
    assert (own.custom_rm_path, own.custom_generate_function_path) == ("my.rewards.score", "my.tools.generate")
    assert own.ignored == ("app_service", "eval_task_timeout") and second.own.ignored == ("eval_task_timeout",)
    assert first.eval.temperature == 0.9, "a null of the set beats the default, and then the run counts"
    data = first.data(DataConfig(tool_key="other"))
    assert (data.prompt_data, data.metadata_key, data.tool_key) == ("/sets/a.jsonl", "extra", "tools")
    assert data.apply_chat_template and data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert second.eval.n_samples_per_prompt == 2 and second.eval.temperature == 0.5


@pytest.mark.parametrize(("word", "fix"), [("maths", "did you mean math?"), ("orr", "correct or remove it")])
def test_a_misspelt_reward_gets_the_nearest_name(tmp_path: Path, word: str, fix: str) -> None:
    text = f"datasets: [{{name: a, path: a.jsonl, rm_type: {word}}}]\n"
    with pytest.raises(ConfigError) as caught:
        eval_sets(EvalConfig(config=write(tmp_path, text)))
    assert [problem.fix for problem in caught.value.problems] == [fix]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rm_type": "maths"}, "eval.datasets[0].rm_type of eval.config must be one of exact_match|"),
        (
            {"custom_rm_path": "nodot"},
            "eval.datasets[0].custom_rm_path of eval.config must be written as package.module:name",
        ),
        ({"stop": "{a: 1}"}, "eval.datasets[0].stop of eval.config must be a list, got"),
        ({"stop_token_ids": "[-1]"}, "eval.datasets[0].stop_token_ids.0 of eval.config must be >= 0"),
        ({"stop_token_ids": "[x]"}, "eval.datasets[0].stop_token_ids.0 of eval.config must be an integer, got"),
        ({"metadata_overrides": "3"}, "eval.datasets[0].metadata_overrides of eval.config must be a mapping, got"),
        (
            {"multimodal_keys": "{image: images}"},
            "no eval.datasets[0].multimodal_keys: every set has",
        ),
        ({"n_samples_per_prompt": "1", "n_samples_per_eval_prompt": "2"}, "have one of eval.datasets[0].n_samples_"),
        ({"path": "${oc.env:NO_SUCH_VARIABLE_HERE}"}, "name a readable YAML file"),
        ({"path": "&a [*a]"}, "name a readable YAML file"),
        ({"path": "[" * 2000}, "name a readable YAML file"),
    ],
)
@pytest.mark.slow
def test_wrong_values_of_a_set_are_one_problem_each(tmp_path: Path, change: dict[str, str], message: str) -> None:
    entry = {"name": "a", "path": "a.jsonl", **change}
    text = "eval:\n  datasets:\n    - {" + ", ".join(f"{key}: {value}" for key, value in entry.items()) + "}\n"
    with pytest.raises(ConfigError) as caught:
        eval_sets(EvalConfig(config=write(tmp_path, text)))
    (problem,) = caught.value.problems
    assert message in str(problem) and "\n" not in str(problem)


def test_a_set_has_the_reward_of_the_run_or_its_own(tmp_path: Path) -> None:
    text = """
datasets:
  own: {path: a.jsonl, custom_rm_path: "my:reward"}
  named: {path: b.jsonl, rm_type: f1}
  plain: {path: c.jsonl}
"""
    own, named, plain = eval_sets(EvalConfig(config=write(tmp_path, text)))
    several = RewardConfig(functions={"a": "math"}, weights={"a": 1.0})
    for run in (RewardConfig(type=RewardType.math), several):
        assert plain.reward(run) is None
        found = own.reward(run)
        assert found is not None and (found.custom_path, found.functions, found.weights) == ("my:reward", {}, {})
    # A built-in reward of the run computes what rows name; others do not.
    assert named.reward(RewardConfig(type=RewardType.math)) is None
    found = named.reward(several)
    assert found is not None and found.type == RewardType.f1 and not found.functions
