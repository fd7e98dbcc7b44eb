"""The process of `rlscale-check-plugin`: tries a user function on an example and writes the result to a file.

    python -m rlscale.plugins.check_process <module:name> <kind> <file with a pickled config> <result file>

The config comes from the parent, in a file of a temporary folder.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlscale.config import RunConfig
from rlscale.config.slime_modules import install_slime_modules
from rlscale.config.user_functions import is_document_form, load_hook, names_judge
from rlscale.errors import ConfigError, Problem
from rlscale.plugins.args_view import Args
from rlscale.plugins.contracts import CONTRACTS, Contract, ContractError
from rlscale.plugins.daemon_call import exit_fork
from rlscale.plugins.example_judge import ExampleJudge
from rlscale.plugins.load_plugin import load_plugin

ASKS_ENGINES = ("generate", "rollout", "eval")
# A function in slime's form may open files and connections that only a run provides; its author must know which.
NO_SERVER = (
    "; the check has no model and no server: `post` of slime.utils.http_utils is answered, other HTTP clients are not; "
    "args.hf_checkpoint is what model=hf model.hf_checkpoint=<folder> sets"
)


def main(argv: Sequence[str], check: Callable[[str, str, RunConfig], list[str]]) -> int:
    """Checks one function. Returns 0 also for a wrong one: the problems are in the result.

    Args:
        check: checks the function of a path, of a kind; raises ConfigError.
    """
    path, kind, config_file, result_file = argv
    faulthandler.enable()
    pid = os.getpid()
    config: RunConfig = pickle.loads(Path(config_file).read_bytes())
    problems: list[dict[str, str]] = []
    lines: list[str] = []
    try:
        lines = check(path, kind, config)
    except ConfigError as error:
        problems = [
            {"path": each.path, "rule": each.rule, "value": each.value, "fix": each.fix} for each in error.problems
        ]
    exit_fork(pid)
    # Renamed when complete: the parent never reads half a result.
    temporary = Path(f"{result_file}.part")
    temporary.write_text(json.dumps({"lines": lines, "problems": problems}), encoding="utf-8")
    os.replace(temporary, result_file)
    return 0


def check(path: str, kind: str, config: RunConfig) -> list[str]:
    """Lines that describe the function and what it returned.

    Raises:
        ConfigError: it cannot be imported or called, raises, or returns something else than its kind requires.
    """
    contract = CONTRACTS[kind]
    if config.run.slime_modules:
        install_slime_modules()
    function = load_hook(contract.key, path)
    form = "slime's documentation" if is_document_form(contract.key, function) else "rlscale"
    judge = ExampleJudge() if names_judge(function) else None
    adapted = load_plugin(contract.key, path, args=Args(config), custom=config.custom, judge=judge)
    if kind == "data_source":
        create = adapted
        adapted = lambda _, tokenizer: create(config, tokenizer)  # noqa: E731
    note = NO_SERVER if kind in ASKS_ENGINES and is_document_form(contract.key, function) else ""
    return [f"arguments: those of {form}", f"returned: {run_contract(contract, adapted, path, no_server=note)}"]


def run_contract(contract: Contract, target: Any, path: str, *, no_server: str = "") -> str:
    """Describes what user code returned.

    Args:
        no_server: what to add to an error of a connection or a file.

    Raises:
        ConfigError: it raised, or returned something else than its kind requires.
    """
    try:
        return contract.check(target)
    except ContractError as error:
        why = error.found if error.says_why else f"it returned {error.found}"
        raise _problem(contract.key, error.rule, path, why) from None
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # user code may raise anything; reported with the place
        needs_run = isinstance(error, OSError) or "Connect" in type(error).__name__  # httpx's errors are no OSError
        note = no_server if needs_run else ""
        raise _problem(contract.key, "work on the example", path, _describe(error) + note) from error


def _describe(error: BaseException) -> str:
    """The exception with the last line of user code: the innermost frame outside of this package."""
    package = str(Path(__file__).parents[1])
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(package)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"it raised {type(error).__name__}: {error}{place}"


def _problem(key: str, rule: str, path: str, fix: str) -> ConfigError:
    return ConfigError([Problem(path=key, rule=rule, value=path, fix=fix)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], check))
