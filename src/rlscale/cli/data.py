"""The command `rlscale-data`: inspects prompt files, converts files to JSON lines, and downloads known data sets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

import rlscale
from rlscale.cli.app import OK, WRONG_INPUT, format_errors
from rlscale.cli.long_paths import reports_long_paths
from rlscale.config import DataConfig, RolloutConfig, RunConfig, load_config_with_notes
from rlscale.config.rules import learns_conversations
from rlscale.config.rules.conditions import is_sft
from rlscale.errors import ConfigError, DataError, Problem, count_noun

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlscale.data.inspect_rows import DataSummary

DEFAULT_ROWS = 10_000
MAX_SHOWN_CHARS = 1500
WIDTH = 120  # where the output is no terminal

_OF_FILES = ("data.prompt_data", "data.prompt_files", "data.prompt_weights")
"""Keys that name the files of a run, and have no effect on those of the command line."""

_USAGE = f"""\
Inspects prompt files as a run would read them, converts a file to JSON lines, or downloads a known data set.

usage: rlscale-data inspect <file> [flags] [group=option ...] [group.key=value ...]
       rlscale-data convert <rows.csv|rows.tsv|rows.json> <rows.jsonl>
       rlscale-data download <gsm8k|gsm8k_solutions|dapo_math_17k|geometry3k|aime> [--into DIR] [--endpoint URL]

examples:
  rlscale-data inspect train.jsonl
  rlscale-data inspect 'math/*.jsonl@[-1000:]' experiment=qwen3_4b_grpo
  rlscale-data inspect train.parquet data.input_key=prompt data.label_key=reward_model.ground_truth
  rlscale-data convert train.csv train.jsonl
  rlscale-data download gsm8k

inspect prints the number of rows, their fields, the lengths of prompts after the chat template, the rows that a run
would drop, by reason, and three prompts as the model gets them. Lengths are tokens with a model (experiment=... or
model=...), else characters. Without data.input_key and data.label_key it looks for the usual names.

download gets the files of data=<name> and eval=<name> from the Hugging Face Hub and records their checksums, with which
later downloads are compared.

flags:
  --into DIR    folder of all data; default: data, where the options look
  --endpoint U  URL of a mirror of the Hub; default: $HF_ENDPOINT, else https://huggingface.co
  --rows N      read at most N rows, evenly spaced; default: {DEFAULT_ROWS}
  --json        print JSON
  -h, --help    print this text
  --version     print the version

exit code: 0 done, 2 the input is wrong
"""


@dataclass(kw_only=True, slots=True)
class _Arguments:
    """The command line of `inspect`."""

    rows: int = DEFAULT_ROWS
    json: bool = False
    paths: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if "-h" in words or "--help" in words:
        sys.stdout.write(_USAGE)
        return OK
    if "--version" in words:
        sys.stdout.write(f"rlscale {rlscale.__version__}\n")
        return OK
    try:
        match words:
            case ["inspect", *others]:
                return _inspect(_parse(others))
            case ["convert", source, target] if not target.startswith("-"):
                return _convert(source, target)
            case ["download", *others]:
                return _download(others)
        if words[:1] == ["convert"] and (flag := next((word for word in words if word.startswith("-")), None)):
            fix = "write ./ in front of a file of this name"
            raise ConfigError([Problem(path="rlscale-data convert", rule="have no flags", value=flag, fix=fix)])
        rule = "be inspect <file>, convert <file> <new file>, or download <name>"
        value = " ".join(words) or "nothing"
        raise ConfigError([Problem(path="rlscale-data", rule=rule, value=value, fix="see rlscale-data --help")])
    except ConfigError as error:
        sys.stderr.write(format_errors("rlscale-data", error))
    except DataError as error:
        sys.stderr.write(f"rlscale-data: {error}\n")
    return WRONG_INPUT


def _download(words: list[str]) -> int:
    from rlscale.data.downloads import DATASETS, download

    flags, names, remaining = {"--into": "data", "--endpoint": ""}, list[str](), list(words)
    while remaining:
        word, equals, value = remaining.pop(0).partition("=")
        if word.startswith("-") and word not in flags:
            rule = f"have no flags but {' and '.join(flags)}"
            raise ConfigError(
                [Problem(path="rlscale-data download", rule=rule, value=word, fix="see rlscale-data --help")]
            )
        if word not in flags:
            names.append(word + equals + value)
            continue
        flags[word] = value or (remaining.pop(0) if remaining else "")
        if not flags[word]:
            fix = "see rlscale-data --help"
            raise ConfigError([Problem(path=word, rule="have a value", value="nothing", fix=fix)])
    wrong = next((name for name in names if name not in DATASETS), None)
    if wrong is not None or not names:
        rule, fix = f"name one of {', '.join(DATASETS)}", "e.g. rlscale-data download gsm8k"
        raise ConfigError([Problem(path="rlscale-data download", rule=rule, value=wrong or "nothing", fix=fix)])
    for name in names:
        download(
            name,
            into=Path(os.path.expanduser(flags["--into"])),
            endpoint=flags["--endpoint"] or None,
            report=lambda file, text: _write_line(f"{file}: {text}"),
        )
    return OK


def _write_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _convert(source: str, target: str) -> int:
    from rlscale.data.convert_rows import convert_rows

    number = convert_rows(Path(os.path.expanduser(source)), Path(os.path.expanduser(target)))
    sys.stdout.write(f"{target}: {count_noun(number, 'row')}\n")
    return OK


def _parse(words: list[str]) -> _Arguments:
    found = _Arguments()
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        flag, equals, given = word.partition("=")
        if word == "--json":
            found.json = True
        elif flag == "--rows":
            given = given if equals else remaining.pop(0) if remaining else "nothing"
            if not given.isdecimal() or not 0 < int(given) < 10**9:
                raise ConfigError(
                    [Problem(path="--rows", rule="be a number of rows above 0", value=given, fix="e.g. --rows 1000")]
                )
            found.rows = int(given)
        elif "=" in word and not Path(word).exists():
            found.overrides.append(word)
        else:
            found.paths.append(word)
    if not found.paths or found.paths[0].startswith("--"):
        value = found.paths[0] if found.paths else "nothing"
        fix = "e.g. rlscale-data inspect train.jsonl"
        raise ConfigError([Problem(path="rlscale-data inspect", rule="have a file", value=value, fix=fix)])
    return found


def _inspect(arguments: _Arguments) -> int:
    # Imported here: the help needs none of it.
    from rlscale.data.data_paths import find_data_files
    from rlscale.data.inspect_rows import PlainTokenizer, guess_keys, summarize_rows
    from rlscale.data.prompts import SftTarget

    names = [word.partition("=")[0].lstrip("+") for word in arguments.overrides]
    if wrong := [name for name in names if name in _OF_FILES]:
        fix = "name the files behind inspect, which this command reads instead"
        raise ConfigError([Problem(path=name, rule="not be set here", value=name, fix=fix) for name in wrong])
    for path in arguments.paths:
        find_data_files(path)
    config = _load(arguments)
    has_model = _has_model(arguments.overrides)
    data = replace(config.data, prompt_data=None, prompt_files=list(arguments.paths), prompt_weights=None)
    given = {word.partition("=")[0].lstrip("+") for word in arguments.overrides}
    guessed = {} if has_model else {k: v for k, v in guess_keys(data).items() if k not in given}
    data = replace(
        data,
        input_key=guessed.get("data.input_key", data.input_key),
        label_key=guessed.get("data.label_key", data.label_key),
    )
    target = None
    if has_model and is_sft(config):
        target = SftTarget.conversations if learns_conversations(config) else SftTarget.labels
    if not has_model:
        data = replace(data, apply_chat_template=True)
    tokenizer: PreTrainedTokenizerBase | PlainTokenizer = PlainTokenizer()
    positions: int | None = None
    if has_model:
        tokenizer, positions = _load_tokenizer(config)
    lengths = config.rollout if has_model else RolloutConfig()
    summary = summarize_rows(data, lengths, tokenizer, positions=positions, sft_target=target, max_rows=arguments.rows)
    if arguments.json:
        sys.stdout.write(json.dumps(asdict(summary), default=str) + "\n")
    else:
        _print(summary, data, guessed, unit="tokens" if has_model else "characters")
    return OK


def _has_model(overrides: Sequence[str]) -> bool:
    return any(word.lstrip("+").startswith(("experiment=", "model=", "model.")) for word in overrides)


def _load(arguments: _Arguments) -> RunConfig:
    """The config of the overrides; without a model only its group `data` is used."""
    base = (
        []
        if _has_model(arguments.overrides)
        else ["+experiment=quickstart", "data.input_key=input", "data.label_key=null", "reward=random"]
    )
    return load_config_with_notes([*base, *arguments.overrides], to_run=False).config


def _load_tokenizer(config: RunConfig) -> tuple[PreTrainedTokenizerBase, int | None]:
    from rlscale.models.hf_models import load_hf_fields, load_tokenizer
    from rlscale.models.resolve_model import resolve_model

    model = resolve_model(config.model)
    return load_tokenizer(model), load_hf_fields(model).get("max_position_embeddings")


def _print(summary: DataSummary, data: DataConfig, guessed: dict[str, str], *, unit: str) -> None:
    from rlscale.data.inspect_rows import QUANTILES

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    read = "" if summary.num_read == summary.num_rows else f", {summary.num_read} of them read, evenly spaced"
    console.print(f"rows: {summary.num_rows}{read}", markup=False)
    if guessed:
        console.print("assumed: " + " ".join(f"{key}={name}" for key, name in guessed.items()), markup=False)
    table = Table("field", "rows", "types", box=None)
    for each in summary.fields:
        types = ", ".join(f"{name} {number}" for name, number in each.types.items())
        table.add_row(Text(each.name), str(each.num_rows), types)
    console.print(table)
    names = ("shortest", "median", "90 %", "99 %", "longest")
    assert len(names) == len(QUANTILES)
    if summary.lengths:
        found = ", ".join(f"{name} {value}" for name, value in zip(names, summary.lengths, strict=True))
        console.print(f"length of prompts in {unit}: {found}", markup=False)
    console.print(f"dropped: {sum(each.num_rows for each in summary.dropped)} of {summary.num_read}", markup=False)
    for dropped in summary.dropped:
        console.print(
            f"  {dropped.num_rows} {dropped.reason}; the first one: {dropped.first}", markup=False, soft_wrap=True
        )
    for prompt in summary.examples:
        console.rule(f"row {prompt.index + 1}, {len(prompt.token_ids)} {unit}", align="left", characters="-")
        text = prompt.text + "".join(part.text for part in prompt.turns)
        cut = "" if len(text) <= MAX_SHOWN_CHARS else f"\n... and {len(text) - MAX_SHOWN_CHARS} more characters"
        console.print(text[:MAX_SHOWN_CHARS] + cut, markup=False)
        if data.label_key is not None:
            console.print(f"label: {json.dumps(prompt.label, ensure_ascii=False)[:MAX_SHOWN_CHARS]}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
