"""The command `rlscale-train`."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from rlscale.cli.app import main_train
from rlscale.cli.secrets import hide_secrets
from rlscale.config import LossType
from rlscale.control.left_calls import exit_process
from rlscale.observe.unfailing_stream import unfailing_output
from rlscale.secrets import redact_override

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from contextlib import AbstractContextManager

    from rlscale.config import RunConfig
    from rlscale.driver.trainer import RunResult, Trainer
    from rlscale.errors import Problem
    from rlscale.rehearsal.rehearsal import Rehearsal


def main() -> None:
    """Entry point of the package."""
    hide_secrets()
    with unfailing_output():
        code = main_train(
            sys.argv[1:], make_job=make_trainer, report=report, check_job=check_run, share_ray=share_ray_of_jobs
        )
    exit_process(code)


def check_run(config: RunConfig, broken: Collection[str]) -> Sequence[Problem]:
    """Problems of files, packages and user code that a config names."""
    # Imported here: `--help` and `--cfg job` need none of it.
    if config.run.rehearsal:
        from rlscale.rehearsal.first_checks import find_launch_problems

        return [] if broken else find_launch_problems(config)
    from rlscale.driver import preflight

    return preflight.check_run(config, broken)


def share_ray_of_jobs(configs: Sequence[RunConfig], num_jobs: int) -> AbstractContextManager[int]:
    """The Ray of the jobs of a sweep."""
    # Imported here, as Ray takes a second.
    from rlscale.cluster.shared_ray import share_ray

    return share_ray(configs, num_jobs)


def make_trainer(config: RunConfig) -> Trainer | Rehearsal:
    """Creates the trainer of a valid config, or its rehearsal."""
    # Imported here because it takes seconds (torch, transformers, Ray): config errors are reported before it.
    if config.run.rehearsal:
        from rlscale.rehearsal.rehearsal import Rehearsal

        return Rehearsal(config, overrides=config.run.overrides)
    from rlscale.driver.trainer import Trainer

    return Trainer(config, overrides=config.run.overrides, is_checked=True)


def report(config: RunConfig, result: RunResult) -> None:
    """Prints the results of a run, its folders, and commands to try next. A rehearsal prints its own report."""
    if config.run.rehearsal:
        return
    # Imported here so that config errors are reported at once.
    from rlscale.observe.jsonl import read_records
    from rlscale.observe.metrics.metric_names import PHASES
    from rlscale.observe.metrics.outcomes import describe_outcomes
    from rlscale.observe.summary import RunSummary, phase_seconds, print_summary

    records, batch = read_records(result.metrics_file), config.batch
    per_rollout = batch.rollout_batch_size * batch.n_samples_per_prompt
    print_summary(
        RunSummary(
            title=config.run.name or result.run_dir.name,  # as the lines of its rollouts
            reward_before=result.initial_eval,
            reward_after=result.final_eval,
            num_steps=result.num_rollouts - result.num_before,
            num_steps_before=result.num_before,
            num_tokens=result.num_tokens,
            seconds=result.seconds,
            run_dir=result.run_dir,
            checkpoint=result.checkpoint,
            hf_folder=result.hf_folder,
            metrics_file=result.metrics_file,
            seconds_by_phase=phase_seconds(records, PHASES),
            trajectories=describe_outcomes(records, per_rollout=per_rollout),
            warnings=result.warnings,
            next_commands=next_commands(config, result),
        )
    )


def next_commands(config: RunConfig, result: RunResult) -> list[tuple[str, str]]:
    """Commands to try next, each with its purpose; they start with the overrides of this run."""
    # An override with a secret must not be printed; names and folders of this run must not be used twice.
    typed = [override for override in config.run.overrides if redact_override(override) == override]
    # Functions that import slime's modules need them in every run.
    typed = [each for each in typed if each.startswith("run.slime_modules=") or not each.lstrip("+").startswith("run.")]
    kept = [each for each in typed if each.lstrip("+") != "experiment=quickstart"]
    # A group may be chosen once.
    others = [each for each in kept if not each.lstrip("+").startswith("algo=")]
    is_rloo = any(each.lstrip("+") == "algo=rloo" for each in kept)
    other = "grpo" if is_rloo else "rloo"
    if config.algo.loss_type == LossType.sft_loss:
        other = "sft_per_token"
    commands = [(f"rlscale-report {shlex.quote(str(result.run_dir))}", "curves and samples, as a page for the browser")]
    if not config.debug.rollout_only:  # it trains nothing: algorithms and their keys have no effect
        algorithm = " ".join(["rlscale-train", *map(shlex.quote, others), f"algo={other}"])
        assert config.optim.lr is not None, "resolved"
        # The rate of this run and its neighbours; a key may be given once.
        swept = "optim.lr=" + ",".join(f"{factor * config.optim.lr:g}" for factor in (0.5, 1, 2))
        unswept = [each for each in kept if not each.lstrip("+").startswith("optim.lr=")]
        commands += [
            (algorithm, "the same with another algorithm"),
            (" ".join(["rlscale-train", *map(shlex.quote, unswept), "-m", swept]), "a sweep, with a table at the end"),
        ]
    if result.hf_folder is not None:
        served = f"rlscale-serve --model-path {shlex.quote(str(result.hf_folder))}"
        commands.append((served, "query the trained model over HTTP"))
    return commands


if __name__ == "__main__":
    main()
