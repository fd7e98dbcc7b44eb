"""The command `rlscale-eval`: evaluates weights without training, or grades kept samples again.

Imports neither torch nor Ray before all of the input is checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rlscale
from rlscale.cli.app import FAILED, INTERRUPTED, OK, RUN_FAILURES, WRONG_INPUT, format_errors
from rlscale.cli.arguments import CommandArguments, parse_arguments
from rlscale.cli.long_paths import reports_long_paths
from rlscale.cli.secrets import hide_secrets
from rlscale.config import LoadedConfig, RunConfig, load_config_with_notes, to_yaml
from rlscale.config.load import CheckConfig, check_nothing, with_origin
from rlscale.control.left_calls import exit_process
from rlscale.errors import ConfigError, DataError, FailureShareError, Problem
from rlscale.secrets import redact_yaml

if TYPE_CHECKING:
    from rlscale.driver.eval_source import EvalSource

COMMAND, REGRADE = "rlscale-eval", "--regrade"
_EXAMPLE = "runs/quickstart-4089f0d6"
_FAILURES = (*RUN_FAILURES, FailureShareError)

_USAGE = """\
Evaluates weights and trains nothing: starts engines, answers the prompts of every set, and prints the rewards.

usage: rlscale-eval SOURCE [flags] [group=option ...] [group.key=value ...]
       rlscale-eval --regrade RUN [flags] [group=option ...] [group.key=value ...]

SOURCE is a run folder (its final export, else its newest checkpoint), the folder of a checkpoint, a Hugging
Face folder or a hub id. The configuration is that of the run; arguments change it.

examples:
  rlscale-eval runs/quickstart-4089f0d6
  rlscale-eval runs/quickstart-4089f0d6/checkpoints/rollout_00000010 eval.n_samples_per_prompt=8
  rlscale-eval Qwen/Qwen3-4B +experiment=qwen3_4b_grpo eval.config=sets.yaml
  rlscale-eval --regrade runs/quickstart-4089f0d6 reward.custom_path=my_rewards:score

flags:
  --regrade RUN       compute the rewards of the kept samples of a run again; needs no model and no engine
  --cfg job           print the complete configuration and start nothing
  --config-dir DIR    also use experiments and options from DIR, which has the layout of conf/
  -h, --help          print this text
  --version           print the version

exit code: 0 done, 1 the evaluation failed, 2 the input is wrong, 130 interrupted
"""


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates or grades again. Returns the exit code."""
    hide_secrets()
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except ConfigError as error:
        sys.stderr.write(format_errors(COMMAND, error))
        return WRONG_INPUT
    except DataError as error:
        sys.stderr.write(f"{COMMAND}: {error}\n")
        return WRONG_INPUT
    except _FAILURES as error:
        return _report_failure(error)
    except BaseExceptionGroup as group:
        first = _first_failure(group)
        if not isinstance(first, _FAILURES):
            raise
        return _report_failure(first)
    except KeyboardInterrupt:
        sys.stderr.write(f"{COMMAND}: interrupted\n")
        return INTERRUPTED


def _run(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        sys.stdout.write(_USAGE)
        return OK if argv else WRONG_INPUT
    if "--version" in argv:
        sys.stdout.write(f"rlscale {rlscale.__version__}\n")
        return OK
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith(f"{REGRADE}=") else [word])]
    place = words.index(REGRADE) if REGRADE in words else None
    if place is not None:
        source = words[place + 1] if len(words) > place + 1 else ""
        others = [*words[:place], *words[place + 2 :]]
    else:
        source, others = _take_source(words)
    if not source or source.startswith("-") or _is_override(source):
        path, rule = "SOURCE", "name a run, a checkpoint or a model"
        fix = f"write it first, e.g. {COMMAND} {_EXAMPLE}"
        if place is not None:
            path, rule = REGRADE, "be followed by a run"
            fix = f"e.g. {COMMAND} {REGRADE} {others[0] if others and Path(others[0]).is_dir() else _EXAMPLE}"
        raise ConfigError([Problem(path=path, rule=rule, value=source or "nothing", fix=fix)])
    arguments = parse_arguments(others)
    if arguments.multirun:
        rule, fix = "not be used here", "evaluate one after the other"
        arguments.problems.append(Problem(path="--multirun", rule=rule, value="-m", fix=fix))
    if arguments.completion is not None:
        fix = "use rlscale-train -sc install=<shell>"
        arguments.problems.append(Problem(path="-sc", rule="not be used here", value="-sc", fix=fix))
    if arguments.problems:
        raise ConfigError(arguments.problems)
    return _regrade(source, arguments) if place is not None else _evaluate(source, arguments)


def _take_source(words: Sequence[str]) -> tuple[str, list[str]]:
    """The first word that is neither a flag nor an override, and the others."""
    skipped = False
    for index, word in enumerate(words):
        if not skipped and not word.startswith("-") and not _is_override(word):
            return word, [*words[:index], *words[index + 1 :]]
        skipped = word in ("--config-dir", "--cfg", "-c")
    return "", list(words)


def _is_override(word: str) -> bool:
    """Whether a word is `key=value`, unless a file or folder has this name."""
    return "=" in word and not Path(os.path.expanduser(word)).exists()


def _evaluate(given: str, arguments: CommandArguments) -> int:
    # Imported here, and below: `--help` needs none of it.
    from rlscale.driver.eval_source import eval_overrides, export_folder, find_source
    from rlscale.driver.preflight import check_run
    from rlscale.models.resolve_model import cache_root

    source = find_source(given)
    model = None if source.checkpoint is not None else source.weights
    check = check_nothing if arguments.show_config else check_run
    loaded = _load(source, arguments, eval_overrides(source, arguments.overrides, model=model), check=check)
    if arguments.show_config:
        sys.stdout.write(redact_yaml(to_yaml(loaded.config)))
        return OK
    if source.checkpoint is not None:
        target = export_folder(source, cache_root(loaded.config.model.cache_dir))
        if not target.exists():
            sys.stderr.write(f"exporting {source.checkpoint.folder} to {target}\n")
            _export(source, target, loaded.config)
        loaded = _load(source, arguments, eval_overrides(source, arguments.overrides, model=str(target)), check=check)
    _print_warnings(loaded, arguments.overrides)
    from rlscale.driver.trainer import Trainer

    try:
        result = Trainer(
            loaded.config, overrides=loaded.config.run.overrides, is_checked=True, measured=source.measured
        ).run()
    except ConfigError as error:
        found = [with_origin(problem, loaded.composed) for problem in error.problems]
        raise ConfigError(found, after_start=error.after_start) from error
    _print_result(result.run_dir)
    return OK


def _load(
    source: EvalSource, arguments: CommandArguments, overrides: Sequence[str], *, check: CheckConfig
) -> LoadedConfig:
    config_dir = arguments.config_dir or source.config_dir
    return load_config_with_notes(overrides, config_dir=config_dir, check=check)


def _export(source: EvalSource, target: Path, config: RunConfig) -> None:
    from rlscale.driver.export_checkpoint import export_checkpoint
    from rlscale.models.resolve_model import resolve_model

    assert source.checkpoint is not None, "the caller checks it"
    model = resolve_model(config.model)
    export_checkpoint(source.checkpoint.folder, target, model=model, config=config)


def _print_warnings(loaded: LoadedConfig, given: Sequence[str]) -> None:
    """Warnings about arguments of the command; those of the run's training have no effect by design."""
    names = [text.lstrip("+~").partition("=")[0] for text in given]
    lines = [line for line in loaded.warnings if any(line.startswith((f"{name} ", f"{name}.")) for name in names)]
    sys.stderr.writelines(f"warning: {line}\n" for line in lines)


def _print_result(run_dir: Path) -> None:
    from rlscale.observe.evaluation_files import find_evaluations, read_about
    from rlscale.observe.evaluation_table import plain_table

    for folder in find_evaluations(run_dir):
        about = read_about(folder)
        lines = [
            f"weights: {about['weights']}, version {about['version']}",
            *plain_table(about["metrics"], about["sets"]),
        ]
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.write(f"samples and metrics: {folder}\n")
    sys.stdout.write(f"rlscale-report {run_dir}\n")


def _regrade(given: str, arguments: CommandArguments) -> int:
    from rlscale.driver.eval_source import eval_overrides, find_run

    source = find_run(given)
    loaded = _load(source, arguments, eval_overrides(source, arguments.overrides), check=_check_rewards)
    if arguments.show_config:
        sys.stdout.write(redact_yaml(to_yaml(loaded.config)))
        return OK
    from rlscale.driver.regrade import regrade_run

    assert source.run is not None, "find_run returns a run"
    for result in regrade_run(source.run, loaded.config):
        for name, before in sorted(result.before.items()):
            if name.endswith("reward_mean") and name in result.after:
                sys.stdout.write(f"version {result.version}: {name} {before:.4f} -> {result.after[name]:.4f}\n")
        sys.stdout.write(f"{result.folder}\n")
    return OK


def _check_rewards(config: RunConfig, broken: Collection[str]) -> Sequence[Problem]:
    """Problems of rewards alone: no model, engine or prompt file is needed."""
    from rlscale.config.user_functions import check_hooks
    from rlscale.driver.preflight.eval_checks import check_eval_functions

    if broken:
        return []
    found: list[Callable[[RunConfig], list[Problem]]] = [check_hooks, check_eval_functions]
    return [problem for check in found for problem in check(config)]


def _report_failure(error: BaseException) -> int:
    sys.stderr.write(f"{COMMAND}: the evaluation failed: {error}\n")
    return FAILED


def _first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_failure(first) if isinstance(first, BaseExceptionGroup) else first


if __name__ == "__main__":
    exit_process(main())
