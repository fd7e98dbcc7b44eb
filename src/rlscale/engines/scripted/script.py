"""Scripts of `rollout.script_path`: a function that answers, or a file of answers.

    module:name      answer(text, request) -> text
    answers.jsonl    {"prompt": "12+30=", "answers": ["<|call|>add 12 30", "42"]}

The first row whose `prompt` is in the text answers; a row without one answers every text. Of its answers the first one
is given that is not in the text yet, so that a row is a conversation of several turns.
"""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlscale.errors import ConfigError, Problem

KEY = "rollout.script_path"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptRequest:
    """A request of a script: what an engine knows of it."""

    rid: str
    index: int  # of the `n` answers
    seed: int
    temperature: float
    max_new_tokens: int
    input_ids: tuple[int, ...]


class Script(Protocol):
    """Answers a text. Runs in a thread; the engine cuts the answer and adds its end."""

    def __call__(self, text: str, request: ScriptRequest, /) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptRow:
    """One row of a file of answers."""

    prompt: str  # part of the text that it answers; "": every text
    answers: tuple[str, ...]


class FileScript:
    """Answers from the rows of a file.

    Example:
        FileScript([ScriptRow(prompt="1+2=", answers=("3",))])("<|user|>1+2=<|assistant|>", request)  # "3"
    """

    def __init__(self, rows: Sequence[ScriptRow]) -> None:
        self._rows = tuple(rows)

    def __call__(self, text: str, request: ScriptRequest, /) -> str:
        row = next((row for row in self._rows if row.prompt in text), None)
        if row is None:
            raise ValueError(f"no row of the script answers {text[-200:]!r}; add a row without prompt")
        position = text.find(row.prompt) + len(row.prompt)
        for answer in row.answers:
            # In order, so that equal answers of a row are separate turns.
            found = text.find(answer, position)
            if found < 0:
                return answer
            position = found + len(answer)
        return row.answers[-1]


def load_script(path: str) -> Script:
    """The script of a path.

    Raises:
        ConfigError: there is none, or it has another form.
    """
    if path.endswith(".jsonl"):
        return _read_file(Path(os.path.expanduser(path)))
    return _import_function(path)


def _read_file(file: Path) -> FileScript:
    if not file.is_file():
        raise _error("name an existing file", str(file), "check the path")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _error("be a file that can be read as UTF-8", str(file), str(error)) from error
    rows = []
    # Not splitlines: JSON allows U+2028 within a text.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line)))
        except (ValueError, RecursionError) as error:
            fix = 'write {"prompt": "1+2=", "answers": ["3"]}'
            raise _error("have rows with answers", f"row {number} of {file}: {error}", fix) from error
    if not rows:
        raise _error("have a row", f"the empty file {file}", 'write {"answers": ["42"]} into it')
    return FileScript(rows)


def _row(value: Any) -> ScriptRow:
    if not isinstance(value, dict) or value.keys() - {"prompt", "answers"}:
        raise ValueError("it must be an object with prompt and answers")
    prompt, answers = value.get("prompt", ""), value.get("answers")
    if not isinstance(prompt, str):
        raise ValueError("prompt must be a text")
    if not isinstance(answers, list) or not answers or not all(isinstance(each, str) for each in answers):
        raise ValueError("answers must be a list of texts")
    return ScriptRow(prompt=prompt, answers=tuple(answers))


def _import_function(path: str) -> Script:
    module, _, name = path.replace(":", ".").rpartition(".")
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the working directory, as for other functions of the user
    try:
        # User code runs here for the first time.
        function: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # the user's module may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise _error("name a function as package.module:name, or a .jsonl file", path, reason) from error
    _check_parameters(function, path)
    answer: Script = function
    return answer


def _check_parameters(function: Callable[..., Any], path: str) -> None:
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise _error("name a plain function", path, "define it with def")
    try:
        inspect.signature(function).bind("text", "request")
    except TypeError as error:
        raise _error("name a function of (text, request)", path, str(error)) from error


def _error(rule: str, value: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=KEY, rule=rule, value=value, fix=fix)])
