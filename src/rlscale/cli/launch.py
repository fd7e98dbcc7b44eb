"""The command `rlscale-launch`: writes the file of a job for Slurm, KubeRay or SkyPilot, and submits it."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import rlscale
from rlscale.cli.app import FAILED, OK, WRONG_INPUT, format_errors
from rlscale.cli.arguments import CommandArguments, parse_arguments
from rlscale.cli.long_paths import reports_long_paths
from rlscale.config import Device, LoadedConfig, load_config_with_notes
from rlscale.config.hydra.overrides import PLAIN_OVERRIDE, SINGLE_VALUE_RULE
from rlscale.config.problems import nearest
from rlscale.config.user_functions import check_hooks
from rlscale.errors import ConfigError, Problem
from rlscale.launch import kuberay, skypilot, slurm
from rlscale.launch.job import RAY_ADDRESS, JobSpec, absolute_run_dir, check_overrides, default_name, variables_of
from rlscale.launch.node_needs import compute_node_needs
from rlscale.launch.options import JobOptions, KubeRayOptions, SkyPilotOptions, SlurmOptions
from rlscale.launch.parse_options import (
    COMMAND_FLAGS,
    OPTIONS,
    LaunchArguments,
    flag_of,
    is_switch,
    option_schemas,
    parse_launch_arguments,
)
from rlscale.launch.submit import check_submission, make_submission, submit
from rlscale.plan import HARDWARE, Plan, find_hardware, make_plan

DEFAULT_GPU = "h100"

_USAGE = """\
Writes one file that runs an experiment as a job. The configuration is checked as by rlscale-train, and nodes, GPUs,
CPUs and memory come from the plan of the run.

usage: rlscale-launch slurm|kuberay|skypilot [options] [group=option ...] [group.key=value ...]

  slurm      an sbatch script that starts Ray on all nodes
  kuberay    a RayJob of KubeRay
  skypilot   a task of SkyPilot

rlscale-launch <launcher> --help lists its options. The groups, options and keys are those of rlscale-train.
"""

_LAUNCHER_USAGE = """\
usage: rlscale-launch {launcher} [options] [group=option ...] [group.key=value ...]

examples:
{examples}

options:
{options}

The groups, options and keys are those of rlscale-train; see rlscale-train --help.
"""

_EXAMPLES = {
    "slurm": "--partition gpu --time 24:00:00 experiment=qwen3_4b_grpo --submit",
    "kuberay": "--image registry.example.com/rlscale:cuda --claim rlscale experiment=qwen3_4b_grpo",
    "skypilot": "--bucket s3://my-runs --spot experiment=qwen3_4b_grpo",
}


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code. 0: written. 1: the submission failed. 2: the input is wrong."""
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except ConfigError as error:
        sys.stderr.write(format_errors("rlscale-launch", error))
        return WRONG_INPUT


def usage(launcher: str) -> str:
    """The text of `rlscale-launch <launcher> --help`."""
    entries = {
        flag_of(name) + ("" if is_switch(launcher, name) else " VALUE"): _help_text(schema)
        for name, schema in option_schemas(launcher).items()
    }
    entries |= {flag + (" FILE" if flag == "--output" else ""): text for flag, text in COMMAND_FLAGS.items()}
    entries |= {
        "--config-dir DIR": "also use experiments and options from DIR, which has the layout of conf/",
        "-h, --help": "print this text",
        "--version": "print the version",
    }
    lines = [
        textwrap.fill(" ".join(text.split()), width=110, initial_indent=f"  {flag:<24}", subsequent_indent=" " * 26)
        for flag, text in entries.items()
    ]
    example = f"  rlscale-launch {launcher} {_EXAMPLES[launcher]}"
    return _LAUNCHER_USAGE.format(launcher=launcher, examples=example, options="\n".join(lines))


def _help_text(schema: Mapping[str, Any]) -> str:
    """The description of an option and its default, unless the description explains the default."""
    default = schema.get("default")
    return f"{schema['description']}; default: {default}" if default else str(schema["description"])


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return OK if argv else WRONG_INPUT
    launcher = argv[0]
    if launcher == "--version":
        sys.stdout.write(f"rlscale {rlscale.__version__}\n")
        return OK
    if launcher not in OPTIONS:
        found = nearest(launcher, OPTIONS)
        fix = f"did you mean {found}?" if found else f"write rlscale-launch slurm {shlex.quote(launcher)}"
        problem = Problem(path="launcher", rule=f"be one of {', '.join(OPTIONS)}", value=launcher, fix=fix)
        raise ConfigError([problem])
    given = parse_launch_arguments(launcher, argv[1:])
    flags = parse_arguments(given.remaining)
    if flags.help or flags.version:
        sys.stdout.write(usage(launcher) if flags.help else f"rlscale {rlscale.__version__}\n")
        return OK
    loaded = _load(given, flags, launcher=launcher)
    assert given.options is not None, "wrong options raise an error before"
    options = _complete(given.options)
    job = make_job(loaded, options, flags=flags, argv=argv)
    return _finish(job, options, given)


def _load(given: LaunchArguments, flags: CommandArguments, *, launcher: str) -> LoadedConfig:
    """The config, as the job loads it. Raises all problems of options and overrides together."""
    problems = [*given.problems, *flags.problems, *check_overrides(flags.overrides)]
    problems += _check_flags(given, flags)
    # Reported above, and replaced below.
    overrides = [each for each in flags.overrides if each.partition("=")[0].lstrip("+~") != RAY_ADDRESS]
    try:
        loaded = load_config_with_notes([*overrides, f"{RAY_ADDRESS}=auto"], config_dir=flags.config_dir)
        problems += check_hooks(loaded.config)
    except ConfigError as error:
        found = [each for each in error.problems if not (flags.multirun and each.rule == SINGLE_VALUE_RULE)]
        raise ConfigError([*problems, *(_name_option(each, launcher) for each in found)]) from None
    if problems:
        raise ConfigError(problems)
    return loaded


def _name_option(problem: Problem, launcher: str) -> Problem:
    """The problem of a flag that is near no option and no key: the check of overrides took it for an override."""
    if not problem.path.startswith("--") or problem.fix != PLAIN_OVERRIDE:
        return problem
    fix = f"rlscale-launch {launcher} --help lists the options"
    return replace(problem, rule="be a known option or key", value=problem.path, fix=fix)


def _check_flags(given: LaunchArguments, flags: CommandArguments) -> list[Problem]:
    found = []
    if flags.multirun:
        found.append(Problem(path="-m", rule="not be used", value="-m", fix="launch one job at a time"))
    if flags.show_config:
        fix = "use rlscale-train --cfg job for the configuration, and --stdout for the file"
        found.append(Problem(path="--cfg", rule="not be used", value="job", fix=fix))
    if given.stdout and given.submit:
        fix = "remove one of the two"
        found.append(Problem(path="--stdout", rule="not be used with --submit", value="--submit", fix=fix))
    hardware = None if given.options is None else given.options.hardware
    if hardware is not None and (hardware not in HARDWARE or hardware == "cpu"):
        names = ", ".join(name for name in HARDWARE if name != "cpu")
        fix = f"remove it to use {DEFAULT_GPU}, or set cluster.device=cpu for a run without GPUs"
        found.append(Problem(path="--hardware", rule=f"be one of {names}", value=hardware, fix=fix))
    return found


def _complete(options: JobOptions) -> JobOptions:
    """Options with the defaults that depend on where the command runs."""
    if isinstance(options, SlurmOptions):
        # The nodes share this environment, unless the user says how to make one.
        activate = Path(sys.prefix) / "bin" / "activate"
        is_default = not options.setup and options.image is None and activate.exists()
        setup = [f"source {shlex.quote(str(activate))}"] if is_default else options.setup
        return replace(options, setup=setup, workdir=options.workdir or _working_folder())
    if isinstance(options, SkyPilotOptions) and options.workdir is None and options.image is None:
        return replace(options, workdir=".")
    return options


def _working_folder() -> str:
    """The current folder. Raises ConfigError if it is not a value of `--workdir`, which would break the script."""
    folder = str(Path.cwd())
    given = parse_launch_arguments("slurm", ["--workdir", folder])
    if given.problems:
        fix = "run this in another folder, or add --workdir <folder>"
        raise ConfigError([replace(problem, fix=fix) for problem in given.problems])
    return folder


def make_job(loaded: LoadedConfig, options: JobOptions, *, flags: CommandArguments, argv: Sequence[str]) -> JobSpec:
    """The job of a config."""
    config = loaded.config
    on_cpu = config.cluster.device == Device.cpu
    plan = make_plan(config, find_hardware("cpu" if on_cpu else options.hardware or DEFAULT_GPU))
    _print_notes(loaded, plan)
    if isinstance(options, SlurmOptions):
        assert options.workdir is not None, "set by _complete"
        folder, config_dir = options.workdir, None if flags.config_dir is None else str(flags.config_dir.absolute())
    else:
        assert isinstance(options, KubeRayOptions | SkyPilotOptions), "there is no other launcher"
        folder, config_dir = options.mount, None if flags.config_dir is None else str(flags.config_dir)
    return JobSpec(
        name=options.name or default_name(config),
        overrides=tuple(flags.overrides),
        config_dir=config_dir,
        run_dir=absolute_run_dir(config, folder),
        needs=compute_node_needs(config, plan, cpus=options.cpus, memory_gib=options.memory),
        actors=_count_actors(plan),
        restarts_nodes=config.fault_tolerance.enabled,
        env=tuple(dict.fromkeys([*options.env, *variables_of(flags.overrides)])),
        written_by=f"{shlex.join(['rlscale-launch', *_without_file_flags(argv)])} (rlscale {rlscale.__version__})",
    )


def _without_file_flags(argv: Sequence[str]) -> list[str]:
    """The arguments that decide what is in the file, so that the same job always has the same file."""
    kept, remaining = list[str](), list(argv)
    while remaining:
        argument = remaining.pop(0)
        if argument == "--output":
            remaining.pop(0)
        elif argument not in ("--stdout", "--submit") and not argument.startswith("--output="):
            kept.append(argument)
    return kept


def _count_actors(plan: Plan) -> str:
    """`8 actor ranks, 8 engines`."""
    actors = {actor for place in plan.places for actor in place.actors}
    counts = Counter(actor.rpartition(" ")[0] for actor in sorted(actors))
    return ", ".join(f"{number} {name}{'s' if number > 1 else ''}" for name, number in counts.items()) or "no actors"


def _print_notes(loaded: LoadedConfig, plan: Plan) -> None:
    sys.stderr.writelines(f"warning: {line}\n" for line in loaded.warnings)
    for budget in plan.over_budget:
        sys.stderr.write(
            f"warning: {budget.where}: needs {budget.needed / 2**30:.0f} GiB of {budget.available / 2**30:.0f} GiB on "
            f"{plan.hardware.name}; rlscale-plan shows why, --hardware plans for another GPU\n"
        )


def write_file(job: JobSpec, options: JobOptions) -> str:
    """The text of the file of a job."""
    match options:
        case SlurmOptions():
            return slurm.write_slurm(job, options)
        case KubeRayOptions():
            return kuberay.write_kuberay(job, options, ray_version=importlib.metadata.version("ray"))
        case SkyPilotOptions():
            return skypilot.write_skypilot(job, options)
    raise AssertionError(f"{type(options).__name__} has no launcher")


_SUFFIXES = {SlurmOptions: slurm.SUFFIX, KubeRayOptions: kuberay.SUFFIX, SkyPilotOptions: skypilot.SUFFIX}


def _finish(job: JobSpec, options: JobOptions, given: LaunchArguments) -> int:
    """Writes the file, or prints it; and submits it."""
    file = Path(given.output or f"{job.name}{_SUFFIXES[type(options)]}")
    submission = make_submission(str(file), job, options)
    problems = skypilot.check_skypilot(job, options) if isinstance(options, SkyPilotOptions) else []
    problems += slurm.check_slurm(options) if isinstance(options, SlurmOptions) else []
    problems += check_submission(submission, job, options) if given.submit else []
    text = write_file(job, options)
    if not given.stdout:
        problems += _check_output(file, text)
    if problems:
        raise ConfigError(problems)
    if given.stdout:
        sys.stdout.write(text)
        return OK
    file.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{file}: {job.needs.text}; {job.actors}; the run is in {job.run_dir}\n")
    if not given.submit:
        sys.stdout.write(f"submit it with: {shlex.join(submission.command)}\n")
        return OK
    sys.stdout.flush()
    done = submit(submission, job, options)
    if done.code != 0:
        command = shlex.join(submission.command)
        sys.stderr.write(f"rlscale-launch: `{command}` failed with exit code {done.code}; its output is above\n")
        return FAILED
    sys.stdout.writelines(f"  {command:<60} {purpose}\n" for command, purpose in done.follow)
    return OK


def _check_output(file: Path, text: str) -> list[Problem]:
    """A file that differs is not overwritten: it may have been edited."""
    try:
        is_other = file.exists() and file.read_text(encoding="utf-8") != text
        is_writable = os.access(file.parent, os.W_OK)
    except (OSError, UnicodeDecodeError):
        is_other, is_writable = True, True
    if not is_writable:
        fix = "choose another file"
        return [Problem(path="--output", rule="be in a folder that can be written", value=str(file), fix=fix)]
    if not is_other:
        return []
    rule, fix = "be a new file", f"remove {file}, or choose another with --output <file>"
    return [Problem(path="--output", rule=rule, value=f"{file}, which has another content", fix=fix)]


if __name__ == "__main__":
    sys.exit(main())
