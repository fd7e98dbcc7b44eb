"""Data sets of an evaluation: from pairs, or from a file with its own sampling."""

from pathlib import Path

import pytest

from rlscale.config import EvalConfig, load_config
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


def test_a_file_is_resolved_with_the_rollouts_own_sampling(tmp_path: Path) -> None:
    loaded = load_config_with_notes([f"eval.config={write(tmp_path, TWO)}", "eval.n_samples_per_prompt=3"])
    assert "eval.prompt_data is ignored: eval.config is set and takes precedence" in loaded.warnings
    hard, _ = eval_sets(loaded.config.eval)
    assert hard.eval.top_k == loaded.config.rollout.top_k and hard.eval.n_samples_per_prompt == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "eval.config must name a file with eval.datasets, a list, got"),
        ("eval: {datasets: []}", "eval.config must name a file with eval.datasets, a list, got"),
        (TWO.replace("defaults", "default"), "got eval.default in"),
        (TWO.replace("temperature: 0.6", "temprature: 0.6"), "eval.defaults.temprature in"),
        (TWO.replace("name: hard, ", ""), "eval.config must have a string as eval.datasets[0].name, got null in"),
        (
            TWO.replace("temperature: 0}", "temperature: -1}"),
            "eval.datasets[1].temperature that must be >= 0, got",
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
