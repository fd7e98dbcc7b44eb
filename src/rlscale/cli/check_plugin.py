"""The command `rlscale-check-plugin`: tries a user function on a small example, in a process with a time limit."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import rlscale
from rlscale.agents.agent_contracts import AGENT_CONTRACTS
from rlscale.cli.app import OK, WRONG_INPUT, format_errors
from rlscale.cli.long_paths import reports_long_paths
from rlscale.config import load_config_with_notes
from rlscale.config.problems import nearest
from rlscale.errors import ConfigError, Problem
from rlscale.plugins.contracts import CONTRACTS as PLUGIN_CONTRACTS

COMMAND = "rlscale-check-plugin"
TIMEOUT_S = 60.0
CONTRACTS = {**PLUGIN_CONTRACTS, **AGENT_CONTRACTS}

_USAGE = """\
Imports a function, checks its parameters, and calls it with a small made example: no model, no GPU.
It runs in a separate process, so a crash or an endless loop ends the check and nothing else.

usage: rlscale-check-plugin MODULE:NAME --kind KIND [flags] [group.key=value ...]

examples:
  rlscale-check-plugin my_reward:score --kind reward
  rlscale-check-plugin my_filter:keep --kind dynamic_filter ++custom.limit=0.5
  rlscale-check-plugin my_tools:add --kind tool

kinds, and the calls that each accepts:
{kinds}

flags:
  --kind KIND      kind of the function
  --timeout S      seconds after which the check fails; default: {timeout:g}
  -h, --help       print this text
  --version        print the version

Overrides are those of rlscale-train; a function of slime's documentation reads them from `args`.
Exit code 0: it works. 2: it does not, or the command line is wrong.
"""


@dataclass(kw_only=True, slots=True)
class CheckArguments:
    """The command line."""

    path: str = ""
    kind: str = ""
    timeout_s: float = TIMEOUT_S
    overrides: list[str] = field(default_factory=list)


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Checks one function and returns the exit code. 0: it works. 2: it does not, or the command line is wrong."""
    words = sys.argv[1:] if argv is None else list(argv)
    if {"-h", "--help"} & set(words):
        kinds = "".join(f"  {each.kind:<20} {each.call}\n" for each in CONTRACTS.values())
        sys.stdout.write(_USAGE.format(kinds=kinds.rstrip(), timeout=TIMEOUT_S))
        return OK
    if "--version" in words:
        sys.stdout.write(f"rlscale {rlscale.__version__}\n")
        return OK
    try:
        arguments = _parse(words)
        lines = check_function(arguments)
    except ConfigError as error:
        sys.stderr.write(format_errors(COMMAND, error))
        return WRONG_INPUT
    contract = CONTRACTS[arguments.kind]
    with_groups = " with reward.group=true" if arguments.kind == "group_reward" else ""
    sys.stdout.write(f"{arguments.path} works as {contract.key}{with_groups}\n")
    sys.stdout.writelines(f"  {line}\n" for line in lines)
    return OK


def check_function(arguments: CheckArguments) -> list[str]:
    """Runs the check in a separate process and returns lines that describe what the function returned.

    Raises:
        ConfigError: it cannot be imported or called, fails, takes too long, or ends the process.
    """
    config = load_config_with_notes(arguments.overrides, to_run=False).config
    with TemporaryDirectory(prefix="rlscale-check-") as folder:
        config_file, result_file = Path(folder, "config"), Path(folder, "result.json")
        config_file.write_bytes(pickle.dumps(config))
        is_agent = arguments.kind in AGENT_CONTRACTS
        module = "rlscale.agents.check_agent_process" if is_agent else "rlscale.plugins.check_process"
        command = [sys.executable, "-m", module, arguments.path, arguments.kind]
        # What the function prints goes to the terminal.
        process = subprocess.Popen([*command, str(config_file), str(result_file)], start_new_session=True)
        try:
            code = process.wait(arguments.timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
        if not result_file.exists():
            raise ConfigError([_end_problem(arguments, code)])
        result = json.loads(result_file.read_text(encoding="utf-8"))
    if result["problems"]:
        raise ConfigError([Problem(**problem) for problem in result["problems"]])
    return list(result["lines"])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the process, and those that the function has started: they share its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_problem(arguments: CheckArguments, code: int | None) -> Problem:
    """The problem of a process that ended without a result. `code` None: it was stopped at the time limit."""
    key = CONTRACTS[arguments.kind].key
    if code is None:
        rule, fix = f"end within {arguments.timeout_s:g} s", "it was stopped; --timeout raises the limit"
    else:
        end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        rule, fix = "return", f"its process ended with {end}"
    return Problem(path=key, rule=rule, value=arguments.path, fix=fix)


def _parse(words: Sequence[str]) -> CheckArguments:
    """Parses the command line. Raises ConfigError with all its problems."""
    arguments, problems, remaining = CheckArguments(), list[Problem](), list(words)
    paths = []
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--kind", "--timeout"):
            value = value if equals else remaining.pop(0) if remaining else "nothing"
            problems += _set_flag(arguments, name, value)
        elif word.startswith("--"):
            near = nearest(name, ("--kind", "--timeout", "--help", "--version"))
            fix = f"did you mean {near}?" if near else f"see {COMMAND} --help"
            problems.append(Problem(path=name, rule="be a known flag", value=word, fix=fix))
        elif "=" in word:
            arguments.overrides.append(word)
        else:
            paths.append(word)
    if len(paths) != 1:
        found, fix = " ".join(paths) or "nothing", f"write {COMMAND} my_reward:score --kind reward"
        problems.append(Problem(path="MODULE:NAME", rule="be one function", value=found, fix=fix))
    if not arguments.kind and not problems:
        problems.append(Problem(path="--kind", rule="be set", value="nothing", fix=f"one of {', '.join(CONTRACTS)}"))
    if problems:
        raise ConfigError(problems)
    arguments.path = paths[0]
    return arguments


def _set_flag(arguments: CheckArguments, name: str, value: str) -> list[Problem]:
    if name == "--kind":
        arguments.kind = value
        if value in CONTRACTS:
            return []
        near = nearest(value, CONTRACTS)
        fix = f"did you mean {near}?" if near else f"see {COMMAND} --help"
        return [Problem(path=name, rule=f"be one of {', '.join(CONTRACTS)}", value=value, fix=fix)]
    try:
        arguments.timeout_s = float(value)
    except ValueError:
        arguments.timeout_s = 0.0
    if arguments.timeout_s > 0:
        return []
    return [Problem(path=name, rule="be a number of seconds above 0", value=value, fix="write --timeout 60")]


if __name__ == "__main__":
    sys.exit(main())
