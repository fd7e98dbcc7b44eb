"""Checks of prompt files before Ray starts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlscale.driver.preflight.data_files import check_prompts, check_replay
from rlscale.driver.preflight.eval_checks import check_eval_sets
from rlscale.models.chat_template import read_chat_template, tiny_chat_template
from rlscale.models.resolve_model import resolve_model
from tests.unit.config.rules.valid_config import SFT, Values, config_with

CHAT: Values = {"data.apply_chat_template": True}


def write(file: Path, *rows: Any) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def problems(path: str, values: Values | None = None) -> list[str]:
    return [str(each) for each in check_prompts(config_with({"data.prompt_data": path, **(values or {})}))]


def test_a_good_file_has_no_problem(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"input": "1+1=", "label": 2, "metadata": None})
    assert problems(path) == problems(f"{path}@[0:1]") == problems(path, CHAT) == []


def test_the_file_exists_and_has_a_known_suffix(tmp_path: Path) -> None:
    gone, csv = tmp_path / "gone.jsonl", tmp_path / "a.csv"
    csv.touch()
    assert problems(str(gone)) == [f"data.prompt_data must name a file that exists, got {gone}; looked for {gone}"]
    assert problems(str(csv)) == [f"data.prompt_data must end in .jsonl or .parquet, got {csv}; convert it"]


@pytest.mark.parametrize(
    ("row", "values", "cause"),
    [
        ({"prompt": "1"}, {}, "{row} must have a field 'input', got fields prompt; correct data.input_key or the file"),
        ({"input": "1"}, {}, "{row} must have a field 'label', got fields input; correct data.label_key or the file"),
        (
            {"input": "1", "label": [2]},
            {},
            "{row} must have a string or number as label, got list under 'label'; correct data.label_key",
        ),
        (
            {"input": "1", "label": 1, "metadata": "x"},
            {},
            "{row} must have an object as metadata, got str under 'metadata'; correct data.metadata_key or the file",
        ),
        (
            {"input": [{"role": "user", "content": "1"}], "label": 1},
            {},
            "{row} must have a string under 'input', got a list of messages; set data.apply_chat_template=true",
        ),
        (
            {"input": 3, "label": 1},
            CHAT,
            "{row} must have a string or a list of messages with `role` and `content` under 'input', got int; correct "
            "data.input_key or the file",
        ),
        (
            {"input": "1"},
            {**CHAT, **SFT, "data.label_key": None},
            "{row} must have a list of messages with `role` and `content` under 'input', got str; correct "
            "data.input_key, or set data.label_key to the field of the answer",
        ),
        (
            {"input": [{"role": "user", "content": "1"}]},
            {**CHAT, **SFT, "data.label_key": None},
            "{row} must fit the chat template; a conversation must have an answer (role assistant) and a message "
            "before it",
        ),
        ([], {}, "{row} must be a JSON object, got list; write one object per line"),
    ],
)
def test_the_first_row_fits_the_config(row: Any, values: Values, cause: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", row, "later rows are not read")
    expected = cause.format(row=f"{path} row 1")
    rule = "data.prompt_data must name a file whose first row can be used, got"
    assert problems(path, values) == [f"{rule} {path}; {expected}"]
    # A source of the user reads the file in its way.
    assert problems(path, {**values, "data.data_source_path": "mine:Source"}) == []


def test_there_is_a_first_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"input": "1", "label": 1})
    for empty in (write(tmp_path / "empty.jsonl"), f"{path}@[1:]", f"{path}@[0:0]"):
        (problem,) = problems(empty)
        assert "must have at least one usable prompt, got none; it has no rows" in problem


def test_the_first_row_of_a_slice_is_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"input": "1"}, {"input": "2", "label": 1})
    assert problems(f"{path}@[1:]") == []
    assert "row 1" in problems(path)[0]


def test_parquet_is_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"input": "1", "label": 1}, {"input": None, "label": 1}]), path)
    assert problems(str(path)) == []
    assert "row 2 must have a field 'input'" in problems(f"{path}@[1:]")[0]
    path.write_text("no Parquet")
    assert "must be a readable Parquet file" in problems(str(path))[0]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert problems(str(path)) == []  # the check of packages reports it


def test_evaluation_sets_have_their_own_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "1", "label": 1})
    values: Values = {"eval.interval": 1, "eval.prompt_data": ["a", path]}
    (problem,) = check_eval_sets(config_with(values))
    assert problem.path == "eval.prompt_data" and "must have a field 'input', got fields question" in problem.fix
    assert check_eval_sets(config_with({**values, "eval.input_key": "question"})) == []
    assert check_eval_sets(config_with({**values, "eval.interval": None})) == []
    file = tmp_path / "sets.yaml"
    file.write_text(f"eval: {{datasets: [{{name: a, path: {path}, input_key: question}}, {{name: b, path: gone}}]}}")
    (problem,) = check_eval_sets(config_with({"eval.interval": 1, "eval.config": str(file)}))
    assert str(problem).startswith("eval.config must name a file that exists, got gone; looked for ")


def model_folder(folder: Path, template: str | None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    settings = {"eos_token": {"content": "<eos>"}, **({} if template is None else {"chat_template": template})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('start with a user') }}{% endif %}{{ eos_token }}"


def test_the_tokenizer_has_a_template_that_accepts_the_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"input": [{"role": "system", "content": "1"}], "label": 1})
    folder = model_folder(tmp_path / "model", None)
    values = {**CHAT, "model.build": None, "model.hf_checkpoint": str(folder)}
    assert problems(path, values) == [
        f"data.apply_chat_template must be false with '{folder}', whose tokenizer has no chat template, got true; give "
        "a model with chat_template.jinja, or prompts that are strings"
    ]
    model_folder(folder, STRICT)
    (problem,) = problems(path, values)
    assert problem.endswith("row 1 must fit the chat template; start with a user")
    # What cannot be rendered here is left to the tokenizer.
    (folder / "chat_template.jinja").write_text("{% generation %}{% endgeneration %}")
    assert problems(path, values) == []
    (folder / "chat_template.jinja").write_text("{{ missing.attribute }}")
    assert problems(path, values) == []


def test_a_template_is_rendered_as_by_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = Path(resolve_model(config_with({"model.cache_dir": str(tmp_path)}).model))
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    for template in (read_chat_template(folder), tiny_chat_template()):
        assert template is not None
        assert template.render(messages, generation_prompt=False) == expected


def test_several_templates_have_a_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "text"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = read_chat_template(tmp_path)
    assert template is not None and template.source == "text"


def test_saved_rollouts_exist(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").touch()
    values: Values = {"debug.load_rollout_data": str(tmp_path / "{rollout_id}.jsonl"), "data.num_rollout": 2}
    (problem,) = check_replay(config_with(values))
    assert problem.value == str(tmp_path / "1.jsonl")
