"""The command `rlscale-check-template`: checks whether agents can be trained with the chat template of a model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

import rlscale
from rlscale.cli.app import FAILED, OK, WRONG_INPUT, format_errors
from rlscale.cli.long_paths import reports_long_paths
from rlscale.config import ModelBuild
from rlscale.config.problems import nearest
from rlscale.errors import ConfigError, Problem, RenderError, count_noun

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlscale.renderers.check_renderer import TemplateCheck
    from rlscale.renderers.renderer import Renderer

COMMAND = "rlscale-check-template"
FLAGS = ("--renderer", "--json", "--help", "--version")
WIDTH = 140  # where the output is no terminal

_USAGE = f"""\
Checks a model's chat template: is an answer parsed as it was rendered, do ids of a longer conversation begin with those
of a shorter one, what ends an answer, which tokens are trained, and do tool calls and reasoning work.

usage: {COMMAND} <model> [flags]

examples:
  {COMMAND} tiny_qwen3_agent
  {COMMAND} Qwen/Qwen3-4B
  {COMMAND} my-model --renderer hermes

<model> is a folder in Hugging Face format, a hub id, or a model that rlscale builds: {", ".join(ModelBuild)}.

flags:
  --renderer NAME   auto (default), a renderer of the library renderers, or a format of answers for the template itself
  --json            print JSON
  -h, --help        print this text
  --version         print the version

exit code: 0 no check failed, 1 a check failed, 2 the input is wrong
"""


@dataclass(kw_only=True, slots=True)
class _Arguments:
    """The command line."""

    model: str = ""
    renderer: str = "auto"
    json: bool = False


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks and returns the exit code. 0: none failed. 1: one failed. 2: the input is wrong."""
    words = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help"} & set(words):
        sys.stdout.write(_USAGE)
        return OK
    if "--version" in words:
        sys.stdout.write(f"rlscale {rlscale.__version__}\n")
        return OK
    try:
        arguments = _parse(words)
        tokenizer, model_type = _load(arguments.model)
        renderer = _make_renderer(arguments, tokenizer, model_type)
    except ConfigError as error:
        sys.stderr.write(format_errors(COMMAND, error))
        return WRONG_INPUT
    # Imported here: wrong arguments are reported at once.
    from rlscale.renderers.check_renderer import check_renderer, describe, failures

    results = check_renderer(renderer, tokenizer)
    if arguments.json:
        content = {"model": arguments.model, "renderer": renderer.name, "checks": describe(results)}
        sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    else:
        _print(arguments.model, renderer, results)
    return FAILED if any(failures(results)) else OK


def _print(model: str, renderer: Renderer, results: Sequence[TemplateCheck]) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    table = Table("check", "verdict", "detail")
    colors = {"ok": "green", "failed": "red", "forks": "yellow", "absent": "dim"}
    for each in results:
        # What a template writes is no markup.
        table.add_row(each.name, Text(each.verdict, style=colors[each.verdict]), Text(each.detail))
    kind = "the library renderers" if type(renderer).__name__ == "LibraryRenderer" else "its chat template"
    console.print(Text(f"{model}: renderer {renderer.name} by {kind}"))
    console.print(table)
    number = sum(each.verdict == "failed" for each in results)
    forks = sum(each.verdict == "forks" for each in results)
    end = f"{count_noun(number, 'check')} failed" if number else "no check failed"
    console.print(Text(end + (f", {count_noun(forks, 'kind')} of turns fork" if forks else "")))


def _load(model: str) -> tuple[PreTrainedTokenizerBase, str]:
    """The tokenizer of a model and its model_type.

    Raises:
        ConfigError: there is none.
    """
    # Imported here: wrong arguments are reported at once.
    from rlscale.architectures.hf_config import read_config_json, tiny_model_fields
    from rlscale.models.hf_models import load_tokenizer
    from rlscale.models.model_path import looks_like_path
    from rlscale.models.tiny_tokenizer import tiny_tokenizer

    if model in list(ModelBuild):
        return tiny_tokenizer(model, 4096), str(tiny_model_fields(model)["model_type"])
    file, near = Path(os.path.expanduser(model)), nearest(model, list(ModelBuild))
    if file.exists() and not file.is_dir():
        fix = "it is a file; give its folder"
        raise ConfigError([Problem(path="<model>", rule="be a folder or a hub id", value=model, fix=fix)])
    # The hub has models without a slash, too, e.g. gpt2.
    if not file.exists() and (near or ("/" in model and looks_like_path(model))):
        fix = f"did you mean {near}?" if near else "e.g. Qwen/Qwen3-4B"
        rule = "name an existing folder or a hub id"
        raise ConfigError([Problem(path="<model>", rule=rule, value=model, fix=fix)])
    try:
        tokenizer = load_tokenizer(model)
    except ConfigError as error:
        (problem, *_) = error.problems
        reason = " ".join(problem.fix.split())[:200]
        if file.is_dir() and not any(file.glob("tokenizer*")):
            reason = "give a folder with tokenizer.json and tokenizer_config.json, such as hf in the folder of a run"
        raise ConfigError([Problem(path="<model>", rule="have a tokenizer", value=model, fix=reason)]) from error
    return tokenizer, str(read_config_json(model).get("model_type", ""))


def _make_renderer(arguments: _Arguments, tokenizer: PreTrainedTokenizerBase, model_type: str) -> Renderer:
    from rlscale.renderers.families import make_renderer

    try:
        return make_renderer(arguments.renderer, tokenizer, model_type=model_type, checkpoint=arguments.model)
    except RenderError as error:
        problem = Problem(path="--renderer", rule="fit the model", value=arguments.renderer, fix=str(error))
        raise ConfigError([problem]) from error


def _parse(words: Sequence[str]) -> _Arguments:
    """Parses the command line. Raises ConfigError with all its problems."""
    arguments, problems, remaining, models = _Arguments(), list[Problem](), list(words), list[str]()
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if name == "--renderer":
            value = value if equals else remaining.pop(0) if remaining else ""
            if not value:
                problems.append(Problem(path=name, rule="have a value", value="nothing", fix="write --renderer auto"))
            arguments.renderer = value
        elif word == "--json":
            arguments.json = True
        elif word.startswith("-"):
            near = nearest(name, FLAGS)
            fix = f"did you mean {near}?" if near else f"see {COMMAND} --help"
            problems.append(Problem(path=name, rule="be a known flag", value=word, fix=fix))
        elif name == "model" and equals:
            models.append(value)
            problems.append(Problem(path="<model>", rule="stand without a key", value=word, fix=f"write {value}"))
        else:
            models.append(word)
    if len(models) != 1:
        found, fix = " ".join(models) or "nothing", f"write {COMMAND} tiny_qwen3_agent"
        problems.append(Problem(path="<model>", rule="be one model", value=found, fix=fix))
    if problems:
        raise ConfigError(problems)
    arguments.model = models[0]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
