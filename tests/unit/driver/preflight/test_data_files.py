"""Checks of prompt files before Ray starts."""

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rlscale.data import first_images
from rlscale.data.first_rows import CHECKED_BYTES
from rlscale.driver.preflight.data_files import check_prompts, check_replay
from rlscale.driver.preflight.eval_checks import check_eval_sets
from rlscale.models.chat_template import read_chat_template
from rlscale.models.resolve_model import resolve_model
from rlscale.models.tiny_tokenizer import tiny_chat_template
from tests.tiny_vision import draw
from tests.unit.config.rules.valid_config import SFT, Values, config_with

CHAT: Values = {"data.apply_chat_template": True}
PICTURE = draw(16, 16)


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
    (problem,) = problems(str(csv))
    assert problem.startswith(
        f"data.prompt_data must name files that can be read, got {csv}; {csv} must end in .jsonl,"
    )
    assert problem.endswith(f"got '.csv'; convert it: rlscale-data convert {csv} {tmp_path / 'a.jsonl'}")


@pytest.mark.parametrize(
    ("row", "values", "cause"),
    [
        ({"prompt": "1"}, {}, "{row} must have a field 'input', got fields prompt; correct data.input_key or the file"),
        ({"input": "1"}, {}, "{row} must have a field 'label', got fields input; correct data.label_key or the file"),
        (
            {"input": "1", "label": [float("nan")]},
            {},
            "{row} must have a JSON value as label under 'label', got [nan]; correct data.label_key or the file",
        ),
        (
            {"input": "1", "label": 1, "metadata": "x"},
            {},
            "{row} must have an object as metadata, or one as JSON text, got string under 'metadata'; correct "
            "data.metadata_key or the file",
        ),
        (
            {"input": [{"role": "user", "content": "1"}], "label": 1},
            {},
            "{row} must have a string under 'input', got a list of messages; set data.apply_chat_template=true",
        ),
        (
            {"input": 3, "label": 1},
            CHAT,
            "{row} must have a string or a list of messages with `role` and `content` under 'input', got integer; "
            "correct data.input_key or the file",
        ),
        (
            {"input": "1"},
            {**CHAT, **SFT, "data.label_key": None},
            "{row} must have a list of messages with `role` and `content` under 'input', got string; correct "
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
    path = write(tmp_path / "a.jsonl", row, "a later row")
    expected = cause.format(row=f"{path} row 1")
    rule = "data.prompt_data must name a file whose rows can be used, got"
    assert problems(path, values) == [f"{rule} {path}; {expected}"]
    # A source of the user reads the file in its way.
    assert problems(path, {**values, "data.data_source_path": "mine:Source"}) == []


PARTS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}]


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"input": "<image>how many?", "pictures": "a.png"}, None),
        ({"input": PARTS, "pictures": ["a.png"]}, None),
        ({"input": "how many?"}, None),
        (
            {"input": "<image>how many?", "images": "a.png"},
            "each of its 0 images, got 1; it has no field 'pictures': correct data.multimodal_keys or the row",
        ),
        ({"input": PARTS, "pictures": ["a.png", "b.png"]}, "each of its 2 images, got 1; correct the row"),
    ],
)
def test_the_first_rows_have_a_place_for_each_image(row: dict[str, Any], cause: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    path = write(tmp_path / "a.jsonl", {**row, "label": 1})
    images: Values = {**CHAT, "model.build": "tiny_qwen2_5_vl", "data.multimodal_keys": {"image": "pictures"}}
    found = problems(path, images)
    rule = f"data.prompt_data must name a file whose rows can be used, got {path}; {path} row 1 must have one <image> "
    assert found == ([] if cause is None else [f"{rule}in its messages for {cause}"])


@pytest.mark.parametrize(
    ("image", "cause"),
    [
        ("none.png", "none.png must be a file; correct the path"),
        ("cut.png", "an image must be a complete file that Pillow reads, got"),
        ("text.png", "an image must be a complete file that Pillow reads, got"),
        ("", "it must be a path, base64 or bytes, got an empty string; correct data.multimodal_keys"),
        (5, "it must be a path, base64 or bytes, got integer; correct data.multimodal_keys"),
        ("http://example.com/a.png", "it must be on this machine, got http://example.com/a.png; download it"),
        ("data:image/png;base64,%", "base64 must be valid, got '%'"),
        ({"url": None}, "it must be a path, base64 or bytes, got null; correct data.multimodal_keys"),
    ],
)
@pytest.mark.parametrize("is_decoded", [True, False])
def test_the_images_of_the_first_rows_are_opened(
    image: Any, cause: str, is_decoded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in (("a.png", PICTURE), ("cut.png", PICTURE[:50]), ("text.png", b"text")):
        (tmp_path / name).write_bytes(content)
    if not is_decoded:  # the first row reaches the limit
        monkeypatch.setattr(first_images, "MAX_PIXELS", 1)
    rows = [{"input": "<image>how many?", "pictures": [each], "label": 1} for each in ("a.png", image)]
    path = write(tmp_path / "a.jsonl", *rows)
    values: Values = {**CHAT, "model.build": "tiny_qwen2_5_vl", "data.multimodal_keys": {"image": "pictures"}}
    found = problems(path, values)
    if not is_decoded and ("complete" in cause or "base64 must" in cause):
        assert found == []  # later images are not decoded
        return
    rule = f"data.prompt_data must name a file whose rows can be used, got {path}; {path} row 2 must have an image as "
    assert len(found) == 1 and found[0].startswith(f"{rule}image 1 under 'pictures'; ")
    assert cause in found[0]
    assert problems(path, {**values, "data.on_bad_row": "skip"}) == []


def write_bytes(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    return str(file)


def hostile(name: str, folder: Path) -> str:
    """The path of a file that cannot be read."""
    good = b'{"input": "1", "label": 1}\n'
    match name:
        case "fifo":
            os.mkfifo(folder / "pipe.jsonl")
            return str(folder / "pipe.jsonl")
        case "folder":
            (folder / "rows").mkdir()
            write_bytes(folder / "rows" / "a.jsonl", good)
            return str(folder / "rows")
        case "slice":
            return write_bytes(folder / "a.jsonl", good) + f"@[{10**23}:]"
        case "no slice":
            return write_bytes(folder / "a.jsonl", good) + "@[1,2]"
        case "gzip":
            return write_bytes(folder / "a.jsonl.gz", gzip.compress(good * 9)[:-12])
        case "no gzip":
            return write_bytes(folder / "a.jsonl.gz", good)
        case "pretty":
            return write_bytes(folder / "a.jsonl", json.dumps({"input": "1"}, indent=2).encode())
        case "utf-16":
            return write_bytes(folder / "a.jsonl", good.decode().encode("utf-16"))
        case "gzip named jsonl":
            return write_bytes(folder / "a.jsonl", gzip.compress(good))
        case "parquet named jsonl":
            return write_bytes(folder / "a.jsonl", b"PAR1" + bytes(99))
        case "zip named jsonl":
            return write_bytes(folder / "a.jsonl", b"PK\3\4" + bytes(99))
        case "pointer":
            return write_bytes(folder / "a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
        case "glob":
            return str(folder / "*.jsonl")
    bad = {
        "json": b'{"input": 1',
        "list": b"[1]",
        "type": b'{"input": 7, "label": 1}',
        "nul": good.replace(b"1", b"\0"),
        "only nul": b"\0" * 99,
        "utf-8": b'{"input": "\xe9", "label": 1}',
        "deep": b'{"input": ' + b"[" * 100_000,
        "digits": b'{"input": ' + b"1" * 9999 + b"}",
        "twice": b'{"input": "1", "input": "2", "label": 1}',
        "empty": b'{"input": " ", "label": 1}',
        "nan": b'{"input": "1", "label": NaN}',
        "surrogate": b'{"input": "a\\ud83d", "label": 1}',
    }
    return write_bytes(folder / "a.jsonl", good * 5 + b"\n" + bad[name] + b"\n" + good)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fifo", "pipe.jsonl must be a regular file, got a fifo, which can be read only once; copy it to a file: cat "),
        ("folder", "must name a file, got the folder {folder}/rows; name its files: {folder}/rows/*.jsonl (a.jsonl)"),
        ("slice", "must have at least one usable prompt, got none; its slice selects none of 1 row"),
        ("no slice", "must end in a slice as @[start:stop] or @[start:stop:step], got @[1,2]; write integers of at"),
        ("gzip", "a.jsonl.gz must be a complete gzip file, got a damaged one"),
        ("no gzip", "a.jsonl.gz must be a complete gzip file, got a damaged one"),
        (
            "pretty",
            "row 1 must be a JSON object in one line, got '{{' of a pretty-printed file; convert it: rlscale-data",
        ),
        ("utf-16", "row 1 must be a JSON object in UTF-8, got UTF-16; convert it: iconv -f utf-16 -t utf-8 {folder}"),
        ("gzip named jsonl", "row 1 must be a JSON object, got a gzip file; name it *.jsonl.gz"),
        ("parquet named jsonl", "row 1 must be a JSON object, got a Parquet file; name it *.parquet"),
        ("zip named jsonl", "row 1 must be a JSON object, got a ZIP archive; unpack it"),
        ("pointer", "row 1 must be a JSON object, got a pointer of Git LFS; get the file: git lfs pull"),
        ("glob", "must match at least one file, got none for {folder}/*.jsonl; check the pattern"),
        ("json", 'row 7 must be a JSON object, got \'{{"input": 1'),
        ("list", "row 7 must be a JSON object, got list; write one object per line"),
        ("type", "row 7 must have a string or a list of messages with `role` and `content` under 'input', got integer"),
        ("nul", "row 7 must be JSON without NUL characters, got"),
        ("only nul", "row 7 must be JSON without NUL characters, got"),
        ("utf-8", "row 7 must be a JSON object in UTF-8, got"),
        ("deep", "row 7 must be a JSON object, got"),
        ("digits", "1111'; write an integer of so many digits as a string"),
        ("twice", "row 7 must be an object that has each key once, got 'input' twice; remove one"),
        ("empty", "row 7 must have a prompt of at least one token under 'input', got ' '; remove the row"),
        ("nan", "row 7 must have a JSON value as label under 'label', got nan; correct data.label_key or the file"),
        (
            "surrogate",
            "row 7 must have whole characters in its prompt, got half of a surrogate pair, '\\ud83d', after 'a'",
        ),
    ],
)
def test_a_hostile_file_is_one_line_with_file_and_row(name: str, message: str, tmp_path: Path) -> None:
    path = hostile(name, tmp_path)
    (problem,) = problems(path)
    assert "\n" not in problem and str(tmp_path) in problem and len(problem) < 800
    assert message.format(folder=tmp_path) in problem
    is_row = " row 7 " in problem or name == "utf-16"
    # A bad row may be skipped, a bad file may not.
    assert bool(problems(path, {"data.on_bad_row": "skip"})) != (is_row or name == "pretty")


def test_a_row_beyond_the_bytes_that_are_checked_is_parsed(tmp_path: Path) -> None:
    good = b'{"input": "1", "label": 1}\n'
    row = good + b'{"input": "' + b"1" * CHECKED_BYTES
    path = write_bytes(tmp_path / "cut.jsonl", row)
    (problem,) = problems(path)
    assert f"{path} row 2 must be a JSON object, got" in problem and "Unterminated string" in problem
    assert problems(f"{path}@[:1]") == []
    assert problems(write_bytes(tmp_path / "whole.jsonl", row + b'", "label": 1}\n')) == []


def test_bom_crlf_and_gzip_are_read(tmp_path: Path) -> None:
    rows = b'\xef\xbb\xbf{"input": "1", "label": 1}\r\n\r\n{"input": "2", "label": 2}\r\n'
    assert problems(write_bytes(tmp_path / "a.jsonl", rows)) == []
    assert problems(write_bytes(tmp_path / "b.jsonl.gz", gzip.compress(rows))) == []


def test_every_file_of_several_is_checked(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", {"input": "1", "label": 1})
    second = write(tmp_path / "b.jsonl", {"input": "1"})
    (problem,) = problems(first, {"data.prompt_files": [first, second, str(tmp_path / "a*.jsonl")]})
    assert problem.startswith(
        f"data.prompt_files must name a file whose rows can be used, got {second}; {second} row 1"
    )


def test_a_file_whose_rows_are_all_far_too_long_is_refused(tmp_path: Path) -> None:
    long = {"input": "1" * (2 * CHECKED_BYTES), "label": 1}
    limit = {"rollout.max_prompt_len": 100}
    path = write(tmp_path / "long.jsonl", long, long)
    (problem,) = problems(path, limit)
    assert f"{path} must have at least one usable prompt, got none; all 2 rows are longer than" in problem
    assert "rollout.max_prompt_len (100 tokens)" in problem
    assert "the model's 4096 positions minus rollout.max_response_len=1024 (3072 tokens)" in problems(path)[0]
    # A shorter row may be anywhere in the file, and a long row may have other fields than a long prompt.
    assert problems(write(tmp_path / "a.jsonl", long, {"input": "1", "label": 1}), limit) == []
    assert problems(write(tmp_path / "b.jsonl", long, {"input": "1", "label": 1, "other": "1" * 200_000}), limit) == []
    short = write(tmp_path / "c.jsonl", {"input": "1" * 200_000, "label": 1})
    assert "its only row is longer than rollout.max_prompt_len" in problems(short, limit)[0]


def test_there_is_a_first_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"input": "1", "label": 1})
    for empty, cause in (
        (write(tmp_path / "empty.jsonl"), "it has no rows"),
        (f"{path}@[1:]", "its slice selects none of 1 row"),
        (f"{path}@[0:0]", "it has no rows"),
    ):
        (problem,) = problems(empty)
        assert f"must have at least one usable prompt, got none; {cause}" in problem


def test_the_first_row_of_a_slice_is_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"input": "1"}, {"input": "2", "label": 1})
    assert problems(f"{path}@[1:]") == []
    assert "row 1" in problems(path)[0]


@pytest.mark.slow
def test_parquet_is_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"input": "1", "label": 1}, {"input": None, "label": 1}]), path)
    assert problems(f"{path}@[:1]") == []
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
    path = write(
        tmp_path / "a.jsonl", {"input": [{"role": role, "content": "1"} for role in ("system", "user")], "label": 1}
    )
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
    for template in (read_chat_template(folder), tiny_chat_template("tiny_qwen3")):
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


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("deepscalr", "name a built-in reward as metadata.rm_type, got 'deepscalr'; did you mean deepscaler?"),
        (3, "name a built-in reward as metadata.rm_type, got '3'; one of exact_match, remote_rm"),
        ("remote_rm", "name no remote_rm as metadata.rm_type without reward.url, got 'remote_rm'; set reward.url"),
        ("judge", "name no judge as metadata.rm_type without reward.engine.num_gpus, got 'judge'"),
    ],
)
def test_rows_name_rewards_that_the_run_can_call(name: Any, cause: str, tmp_path: Path) -> None:
    rows = [{"input": "1+1=", "label": 2, "metadata": {"rm_type": each}} for each in ("math", "", None, name)]
    path = write(tmp_path / "a.jsonl", *rows)
    (problem,) = problems(path)
    assert "must name a file whose rows can be used" in problem and "row 4 must " in problem and cause in problem
    assert problems(path, {"reward.custom_path": "a:b"}) == []
    assert problems(write(tmp_path / "b.jsonl", *rows[:3])) == []
