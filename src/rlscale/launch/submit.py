"""Submits a job file with the tool of its scheduler."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlscale.errors import Problem
from rlscale.launch.job import JobSpec
from rlscale.launch.options import JobOptions, KubeRayOptions, SkyPilotOptions, SlurmOptions
from rlscale.launch.skypilot import TOKEN, secret_flags


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """The command that submits a file."""

    command: tuple[str, ...]
    extra_env: Mapping[str, str]  # in addition to the environment


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """The result of a submission, and commands to follow the job, each with its purpose."""

    code: int
    follow: tuple[tuple[str, str], ...] = ()


def make_submission(file: str, job: JobSpec, options: JobOptions) -> Submission:
    """The command that submits `file`. Secrets are passed by name, never on a command line."""
    match options:
        case SlurmOptions():
            return Submission(command=("sbatch", file), extra_env={})
        case KubeRayOptions():
            return Submission(command=("kubectl", "apply", *_namespace(options), "--filename", file), extra_env={})
        case SkyPilotOptions():
            command = ("sky", "jobs", "launch", "--yes", "--detach-run", *secret_flags(job), file)
            # A token that was set is kept, e.g. for a job that is submitted again.
            token = os.environ.get(TOKEN) or secrets.token_hex(32)
            return Submission(command=command, extra_env={TOKEN: token})
    raise AssertionError(f"{type(options).__name__} has no submission")


def check_submission(submission: Submission, job: JobSpec, options: JobOptions) -> list[Problem]:
    """Problems that are known before anything is written."""
    tool, found = submission.command[0], list[Problem]()
    if shutil.which(tool) is None:
        fix = f"run this where {tool} is installed, or submit the file from there without --submit"
        found.append(Problem(path="--submit", rule=f"find the command {tool}", value="no such command", fix=fix))
    # Pods get their variables from Secrets; the other schedulers from this environment.
    if not isinstance(options, KubeRayOptions):
        for name in job.env:
            if not os.environ.get(name):
                fix = f"run `export {name}=<value>` first"
                problem = Problem(path=f"--env {name}", rule="name a variable that is set", value="nothing", fix=fix)
                found.append(problem)
    return found


def submit(submission: Submission, job: JobSpec, options: JobOptions) -> Submitted:
    """Runs the command; its output is shown."""
    done = subprocess.run(
        submission.command,
        env={**os.environ, **submission.extra_env},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return Submitted(code=done.returncode)
    return Submitted(code=0, follow=tuple(_follow(done.stdout, job, options)))


def _follow(output: str, job: JobSpec, options: JobOptions) -> Sequence[tuple[str, str]]:
    match options:
        case SlurmOptions():
            found = re.search(r"job (\d+)", output)
            number = found[1] if found else "<job>"
            return [
                (f"squeue --job {number}", "state of the job"),
                (f"tail -F {shlex.quote(f'{options.workdir}/{job.name}-{number}.log')}", "log"),
                (f"scancel --batch --signal=USR1 {number}", "save a checkpoint and requeue"),
                (f"scancel {number}", "end it"),
            ]
        case KubeRayOptions():
            kubectl = " ".join(["kubectl", *_namespace(options)])
            return [
                (f"{kubectl} get rayjob {job.name} --watch", "state of the job"),
                (f"{kubectl} logs --follow job/{job.name}", "log"),
                (f"{kubectl} delete rayjob {job.name}", "end it; the run folder stays on the volume"),
            ]
        case _:
            return [
                ("sky jobs queue", "state of the job"),
                (f"sky jobs logs --name {job.name}", "log"),
                (f"sky jobs cancel --name {job.name}", "end it"),
            ]


def _namespace(options: KubeRayOptions) -> tuple[str, ...]:
    return () if options.namespace is None else ("--namespace", options.namespace)
