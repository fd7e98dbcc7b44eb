"""The command `rlscale-plan`: what a run will do, from the same words as `rlscale-train`, and nothing is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console

import rlscale
from rlscale.cli.app import OK, WRONG_INPUT, format_errors
from rlscale.cli.arguments import parse_arguments
from rlscale.config import Device, LoadedConfig, RunConfig, load_config_with_notes
from rlscale.config.errors import nearest
from rlscale.config.hydra.overrides import SINGLE_VALUE_RULE
from rlscale.errors import ConfigError, Problem
from rlscale.plan import HARDWARE, Hardware, Plan, find_fixes, hardware_named, make_plan, parts_not_built
from rlscale.plan.tables import print_plan

DEFAULT_GPU = "h100"
WIDTH = 120  # where the output is no terminal

_USAGE = """\
Tells what a run will do, and starts nothing: batches, placement, memory, weight sync, the least time of a step, what
was derived, and what has no effect.

usage: rlscale-plan [flags] [group=option ...] [group.key=value ...]

examples:
  rlscale-plan experiment=qwen3_4b_grpo
  rlscale-plan experiment=qwen3_4b_grpo --hardware h200 --response-tokens 3000
  rlscale-plan experiment=qwen3_4b_grpo model=qwen3_14b cluster.actor_num_gpus_per_node=8 --json

flags:
  --hardware NAME        {hardware}; default: cpu with cluster.device=cpu, else {default}
  --prompt-tokens N      length of a prompt; default: rollout.max_prompt_len
  --response-tokens N    length of a response; default: rollout.max_response_len
  --json                 print JSON: bytes and seconds
  --config-dir DIR       also take experiments and options from DIR, laid out like conf/
  -h, --help             this text
  --version              the version

The groups, options and keys are those of rlscale-train; see rlscale-train --help.
"""


_WITH_VALUE = ("--hardware", "--prompt-tokens", "--response-tokens")


@dataclass(kw_only=True, slots=True)
class Flags:
    """What is asked of this command; all other words describe the run."""

    hardware: str | None = None
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    json: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, and returns the exit code. 0: planned, whether it fits or not. 2: the input is wrong."""
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except ConfigError as error:
        sys.stderr.write(format_errors("rlscale-plan", error))
        return WRONG_INPUT


def _run(argv: list[str]) -> int:
    flags, words, problems = read_flags(argv)
    arguments = parse_arguments(words)
    if arguments.help:
        sys.stdout.write(_USAGE.format(hardware=", ".join(HARDWARE), default=DEFAULT_GPU))
        return OK
    if arguments.version:
        sys.stdout.write(f"rlscale {rlscale.__version__}\n")
        return OK
    problems += arguments.problems
    if arguments.multirun:
        problems.append(Problem(path="-m", rule="be left out", value="-m", fix="plan one job at a time"))
    try:
        loaded = load_config_with_notes(arguments.overrides, config_dir=arguments.config_dir, to_run=False)
    except ConfigError as error:
        others = [each for each in error.problems if not (arguments.multirun and each.rule == SINGLE_VALUE_RULE)]
        raise ConfigError([*problems, *others]) from None
    if problems:
        raise ConfigError(problems)
    _show(loaded, flags)
    return OK


def _show(loaded: LoadedConfig, flags: Flags) -> None:
    hardware = _hardware(loaded.config, flags)

    def replan(config: RunConfig) -> Plan:
        return make_plan(
            config,
            hardware,
            prompt_tokens=flags.prompt_tokens,
            response_tokens=flags.response_tokens,
        )

    plan = replace(
        replan(loaded.config),
        derived=loaded.derived,
        warnings=loaded.warnings,
        not_built=parts_not_built(loaded.config, loaded.derived),
    )
    fixes = find_fixes(loaded.config, plan, replan)
    if flags.json:
        text = {**plan.to_dict(), "fits": not plan.over_budget, "fixes": [asdict(fix) for fix in fixes]}
        sys.stdout.write(json.dumps(text, indent=2, default=str) + "\n")
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH, soft_wrap=False)
    print_plan(plan, fixes, console)


def _hardware(config: RunConfig, flags: Flags) -> Hardware:
    if flags.hardware is None:
        return hardware_named("cpu" if config.cluster.device == Device.cpu else DEFAULT_GPU)
    return hardware_named(flags.hardware)


def read_flags(argv: Sequence[str]) -> tuple[Flags, list[str], list[Problem]]:
    """The flags of this command, the other words, and what is wrong with the flags."""
    flags, rest, problems = Flags(), list[str](), list[Problem]()
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word == "--json":
            flags.json = True
        elif (found := nearest(name, _WITH_VALUE, limit=1)) and name.startswith("--"):
            value = value if equals else words.pop(0) if words else ""
            if found == name:
                problems += _set_flag(flags, name, value)
            else:
                problems.append(Problem(path=name, rule="be a known flag", value=name, fix=f"did you mean {found}?"))
        else:
            rest.append(word)
    return flags, rest, problems


def _set_flag(flags: Flags, name: str, value: str) -> list[Problem]:
    if name == "--hardware":
        flags.hardware = value
        if value not in HARDWARE:
            fix = f"leave it out for cpu or {DEFAULT_GPU}, as cluster.device says"
            return [Problem(path=name, rule=f"be one of {', '.join(HARDWARE)}", value=value or "nothing", fix=fix)]
    elif value.isdigit() and int(value) > 0:
        setattr(flags, name.lstrip("-").replace("-", "_"), int(value))
    else:
        fix = "leave it out for the limit that the config has"
        return [Problem(path=name, rule="be a number of tokens, at least 1", value=value or "nothing", fix=fix)]
    return []


if __name__ == "__main__":
    sys.exit(main())
