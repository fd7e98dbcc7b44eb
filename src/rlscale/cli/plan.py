"""The command `rlscale-plan`: plans a run from the overrides of `rlscale-train` and starts nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console

import rlscale
from rlscale.cli.app import OK, WRONG_INPUT, format_errors
from rlscale.cli.arguments import parse_arguments
from rlscale.cli.long_paths import reports_long_paths
from rlscale.cli.plan_schedule import COSTS_FLAG, FLAG, parse_costs, print_schedules
from rlscale.config import Device, LoadedConfig, RunConfig, load_config_with_notes
from rlscale.config.hydra.overrides import SINGLE_VALUE_RULE
from rlscale.config.problems import nearest
from rlscale.errors import ConfigError, Problem
from rlscale.plan import HARDWARE, Hardware, Plan, find_hardware, find_refused, find_suggestions, make_plan
from rlscale.plan.rollout_simulation import NO_COSTS, EngineCosts
from rlscale.plan.tables import print_plan

DEFAULT_GPU = "h100"
WIDTH = 120  # where the output is no terminal

_USAGE = """\
Plans a run and starts nothing: prints batches, placement, memory, weight sync, a lower bound of the time
of a rollout, derived values, and ignored keys.

usage: rlscale-plan [flags] [group=option ...] [group.key=value ...]

examples:
  rlscale-plan experiment=qwen3_4b_grpo
  rlscale-plan experiment=qwen3_4b_grpo --hardware h200 --response-tokens 3000
  rlscale-plan experiment=qwen3_4b_grpo model=qwen3_14b cluster.actor_num_gpus_per_node=8 --json

flags:
  --hardware NAME        {hardware}; default: cpu with cluster.device=cpu, else {default}.
                         A GPU means cluster.device=cuda, also on a machine without GPUs
  --prompt-tokens N      length of a prompt; default: rollout.max_prompt_len
  --response-tokens N    length of a response; default: rollout.max_response_len
  --schedule FILE        compare the schedules of rollouts for the response lengths in FILE, lines such as
                         {{"length": 120}} or, for the responses of a prompt, {{"lengths": [120, 340]}}
  --engine-costs COSTS   for --schedule, measured times of the engine, in decoding steps with all slots:
                         step_of_one=0.8,request=0.2,abort=0.3,prefill=1,prefill_token=0.006 is a step of a single
                         request, transfer and abort of a request, prefill, and prefill of a token of a response
                         that is continued; default: a step of one takes as long as one of all, the rest no time
  --json                 print JSON: bytes and seconds
  --config-dir DIR       also use experiments and options from DIR, which has the layout of conf/
  -h, --help             print this text
  --version              print the version

The groups, options and keys are those of rlscale-train; see rlscale-train --help.
"""


_WITH_VALUE = (FLAG, COSTS_FLAG, "--hardware", "--prompt-tokens", "--response-tokens")


@dataclass(kw_only=True, slots=True)
class PlanFlags:
    """The flags of this command; all other arguments describe the run."""

    hardware: str | None = None
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    schedule: str | None = None
    engine_costs: EngineCosts = NO_COSTS
    json: bool = False


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Plans a run and returns the exit code. 0: planned, whether it fits or not. 2: the input is wrong."""
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except ConfigError as error:
        sys.stderr.write(format_errors("rlscale-plan", error))
        return WRONG_INPUT


def _run(argv: list[str]) -> int:
    flags, others, problems = read_flags(argv)
    arguments = parse_arguments(others)
    if arguments.help:
        sys.stdout.write(_USAGE.format(hardware=", ".join(HARDWARE), default=DEFAULT_GPU))
        return OK
    if arguments.version:
        sys.stdout.write(f"rlscale {rlscale.__version__}\n")
        return OK
    problems += arguments.problems
    if arguments.multirun:
        problems.append(Problem(path="-m", rule="not be used", value="-m", fix="plan one job at a time"))
    if arguments.show_config:
        fix = "print it with rlscale-train --cfg job"
        problems.append(Problem(path="--cfg", rule="not be used", value="--cfg", fix=fix))
    if arguments.completion is not None:
        fix = "use rlscale-train -sc install=<shell>"
        problems.append(Problem(path="-sc", rule="not be used", value="-sc", fix=fix))
    overrides = _with_device(arguments.overrides, flags, problems)
    try:
        loaded = load_config_with_notes(overrides, config_dir=arguments.config_dir, to_run=False)
    except ConfigError as error:
        # With -m the overrides of a sweep may have several values; -m itself is reported.
        found = [each for each in error.problems if not (arguments.multirun and each.rule == SINGLE_VALUE_RULE)]
        raise ConfigError([*problems, *found]) from None
    if problems:
        raise ConfigError(problems)
    _show(loaded, flags)
    return OK


def _with_device(overrides: Sequence[str], flags: PlanFlags, problems: list[Problem]) -> list[str]:
    """The overrides with `cluster.device` of the named hardware; adds a problem if the command line has another one."""
    if flags.hardware is None:
        return list(overrides)
    device = Device.cpu if flags.hardware == "cpu" else Device.cuda
    given = [word for word in overrides if word.lstrip("+").startswith("cluster.device=")]
    values = [word.partition("=")[2] for word in given]
    if wrong := [value for value in values if value not in (device, Device.auto)]:
        rule, fix = f"be {device} with --hardware {flags.hardware}", "remove one of the two"
        problems.append(Problem(path="cluster.device", rule=rule, value=wrong[0], fix=fix))
    # The last override wins, also over the files of the experiment.
    return [*(word for word in overrides if word not in given), f"cluster.device={device}"]


def _show(loaded: LoadedConfig, flags: PlanFlags) -> None:
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
        refused=find_refused(loaded.config, loaded.derived),
    )
    if flags.schedule is not None:
        width = None if sys.stdout.isatty() else WIDTH
        print_schedules(loaded.config, plan, flags.schedule, costs=flags.engine_costs, as_json=flags.json, width=width)
        return
    suggestions = find_suggestions(loaded.config, plan, replan)
    if flags.json:
        text = {**plan.to_dict(), "fits": not plan.over_budget}
        text["suggestions"] = [asdict(each) for each in suggestions]
        sys.stdout.write(json.dumps(text, indent=2, default=str) + "\n")
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH, soft_wrap=False)
    print_plan(plan, suggestions, console)


def _hardware(config: RunConfig, flags: PlanFlags) -> Hardware:
    # By default a run on a CPU is planned for one, and any other run for a GPU.
    if flags.hardware is None:
        return find_hardware("cpu" if config.cluster.device == Device.cpu else DEFAULT_GPU)
    return find_hardware(flags.hardware)


def read_flags(argv: Sequence[str]) -> tuple[PlanFlags, list[str], list[Problem]]:
    """The flags of this command, the other arguments, and the problems of the flags."""
    flags, others, problems = PlanFlags(), list[str](), list[Problem]()
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        if argument == "--json":
            flags.json = True
        # A misspelt flag takes its value along, so that the value is not reported as an override.
        elif (found := nearest(name, _WITH_VALUE, limit=1)) and name.startswith("--"):
            value = value if equals else remaining.pop(0) if remaining else ""
            if found == name:
                problems += _set_flag(flags, name, value)
            else:
                problems.append(Problem(path=name, rule="be a known flag", value=name, fix=f"did you mean {found}?"))
        else:
            others.append(argument)
    if flags.engine_costs != NO_COSTS and flags.schedule is None:
        fix = f"add {FLAG} lengths.jsonl, or remove it"
        problems.append(Problem(path=COSTS_FLAG, rule=f"be used with {FLAG}", value="no lengths", fix=fix))
    return flags, others, problems


def _set_flag(flags: PlanFlags, name: str, value: str) -> list[Problem]:
    if name == "--hardware":
        if value not in HARDWARE:
            found = nearest(value, HARDWARE)
            fix = f"remove it to use cpu or {DEFAULT_GPU}, depending on cluster.device"
            fix = f"did you mean {found}?" if found else fix
            return [Problem(path=name, rule=f"be one of {', '.join(HARDWARE)}", value=value or "nothing", fix=fix)]
        flags.hardware = value
    elif name == FLAG:
        if not value:
            return [
                Problem(path=name, rule="name a file", value="nothing", fix="give the path of a JSONL file of lengths")
            ]
        flags.schedule = value
    elif name == COSTS_FLAG:
        try:
            flags.engine_costs = parse_costs(value)
        except ConfigError as error:
            return list(error.problems)
    elif value.isdecimal() and int(value) > 0:
        setattr(flags, name.lstrip("-").replace("-", "_"), int(value))
    else:
        fix = "remove it to use the limit of the config"
        return [Problem(path=name, rule="be a number of tokens, at least 1", value=value or "nothing", fix=fix)]
    return []


if __name__ == "__main__":
    sys.exit(main())
