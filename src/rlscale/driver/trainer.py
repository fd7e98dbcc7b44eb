"""Entry point of the library: `rlscale.Trainer`, which the command `rlscale-train` calls, too.

Example:
    config = rlscale.load_config(["+experiment=quickstart", "data.num_rollout=20"])
    result = rlscale.Trainer(config).run()
    print(result.final_eval, result.hf_folder)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlscale.checkpoint.run_folder import RunFolder
from rlscale.checkpoint.store import CheckpointStore
from rlscale.cluster.ray_session import RaySession, ray_session
from rlscale.cluster.shared_engines import finds_host
from rlscale.config import (
    RunConfig,
    has_zero_reward,
    learns_from_differences,
    samples_otherwise,
    to_dict,
    to_yaml,
    uses_teacher,
)
from rlscale.config.rules import overlaps, shares_base
from rlscale.control.ci_checks import check_metric
from rlscale.control.loop_config import Progress
from rlscale.control.oom_advice import with_memory_advice
from rlscale.control.signals import cancellation_as_interrupt
from rlscale.driver.preflight import check_run
from rlscale.driver.warmup import warmup_config, warmup_is_used
from rlscale.errors import ConfigError, EngineError, Problem, WorkerError
from rlscale.models.resolve_model import is_hf_folder, resolve_model
from rlscale.observe.console import Console, open_console
from rlscale.observe.dumps import BatchDump, RolloutDump
from rlscale.observe.evaluation_files import EvaluationFiles, Measured
from rlscale.observe.jsonl import JsonlSink, read_records
from rlscale.observe.provenance import write_provenance
from rlscale.observe.reporter import Observer, RolloutFiles, diff_limit
from rlscale.observe.rollout_log import STEP_FILES, TIMELINES_FILE, RolloutLog, TokenTexts
from rlscale.observe.run_end import EndReason, recorded_end
from rlscale.observe.step_lines import StepLines
from rlscale.observe.trackers.open_trackers import TrackedRun, open_trackers
from rlscale.plan.placement import build_layout
from rlscale.secrets import redact, redact_yaml

if TYPE_CHECKING:
    from rlscale.driver.prepared_run import PreparedRun
    from rlscale.driver.substitutes import Substitutes


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Files and results of a finished run."""

    run_dir: Path
    checkpoint: Path | None  # the newest
    hf_folder: Path | None  # final export, which transformers loads
    metrics_file: Path
    num_rollouts: int  # of the whole run
    num_before: int  # rollouts of earlier starts
    num_tokens: int  # generated for training (SFT: trained on) by this start
    seconds: float  # of the loop of this start, without the preparation
    initial_eval: float | None  # mean held-out reward before the first rollout
    final_eval: float | None
    objective: float | None  # final_eval, else the mean reward of the last rollout
    warnings: tuple[str, ...] = ()


class Trainer:
    """Runs one resolved config from start to end in this process.

    Args:
        config: from `rlscale.load_config`.
        overrides: the command line, for the record in the run folder.
        session: Ray, started for this run or a larger one. None: `run` starts Ray, and ends it.
        is_checked: `preflight.check_run` found no problem of the config. False: `run` checks it before it starts Ray.
        substitutes: parts of a rehearsal. None: the run itself.
        measured: origin of the weights of a run that only evaluates. None: version 0 of this run.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        overrides: Sequence[str] = (),
        session: RaySession | None = None,
        is_checked: bool = False,
        substitutes: Substitutes | None = None,
        measured: Measured | None = None,
    ) -> None:
        self.config, self._overrides, self._session = config, tuple(overrides), session
        self._is_checked, self._substitutes, self._measured = is_checked, substitutes, measured

    def run(self) -> RunResult:
        """Trains, and returns the places of everything it wrote.

        Raises:
            ConfigError, DataError: found before any trainer or engine was started; almost all before Ray was.
            WorkerError, EngineError, WeightSyncError, RewardError: the first cause of a failure, after every process
                of the run has ended.
        """
        config = self.config
        if config.run.rehearsal:
            rule, fix = "be false for rlscale.Trainer", "run it with rlscale-train"
            raise ConfigError([Problem(path="run.rehearsal", rule=rule, value="true", fix=fix)])
        if self._session is None and not self._is_checked and (problems := check_run(config)):
            raise ConfigError(problems)
        with ExitStack() as stack:
            stack.enter_context(_marked_as_started())
            session = self._session or stack.enter_context(
                ray_session(config.cluster, build_layout(config), may_spin=not overlaps(config))
            )
            # Imported while Ray starts.
            from rlscale.driver.prepared_run import prepare_run
            from rlscale.driver.run import Run, find_resume_point

            # Tokenizer and data are read while Ray starts.
            prepared = prepare_run(config, _starting_model(config, session))
            if self._substitutes is not None:
                prepared = prepared.with_substitutes(self._substitutes)
            elif shares_base(config) and finds_host():
                prepared = prepared.with_shared_engines()
            if self._measured is not None:
                prepared = replace(prepared, measured=self._measured)
            session.wait()
            folder = stack.enter_context(_open_folder(prepared, self._overrides))
            end = stack.enter_context(recorded_end(folder.path))
            console = stack.enter_context(_open_console(prepared))
            store = _open_store(config, folder)
            start = find_resume_point(config, folder, store, console)
            before = replace(start.progress)  # a copy: the run may advance the original
            with closing(_open_observer(prepared, folder, console, before.next_rollout)) as observer:
                run = Run(prepared, folder=folder, store=store, observer=observer)
                began = time.perf_counter()
                try:
                    with cancellation_as_interrupt():
                        progress = asyncio.run(run.run(start))
                except (WorkerError, EngineError) as error:
                    raise with_memory_advice(error, config) from error
                except KeyboardInterrupt:
                    if run.stop_requested:
                        saved = "rollout" if config.debug.rollout_only else "checkpoint"
                        end.reason, end.text = EndReason.stopped, f"SIGUSR1 ended it after a {saved}"
                    raise
            seconds = time.perf_counter() - began
            result = _result(folder, store, before, progress, seconds=seconds, warnings=tuple(observer.warnings))
            folder.finish({name: _plain(value) for name, value in asdict(result).items()})
            end.reason = EndReason.stop_reward if progress.stopped else EndReason.finished
            if config.ci.enabled:
                check_metric(config.ci, read_records(folder.metrics))
            return result


@contextmanager
def _marked_as_started() -> Iterator[None]:
    """Marks problems of the config that are raised inside as found after the start of Ray."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.problems, after_start=True) from error


def _starting_model(config: RunConfig, session: RaySession) -> str:
    """The Hugging Face folder or hub id of the starting weights; runs the warm-up if it has not run yet."""
    load = config.checkpoint.load
    if load is not None and is_hf_folder(load):
        return resolve_model(replace(config.model, build=None, hf_checkpoint=load))
    warmup = warmup_config(config) if warmup_is_used(config) else None
    if warmup is None:
        return resolve_model(config.model)
    assert warmup.run.dir is not None
    folder = Path(warmup.run.dir)
    if not (folder / "finished.json").exists():
        Trainer(warmup, session=session).run()
    return str(folder / "hf")


@contextmanager
def _open_folder(prepared: PreparedRun, overrides: Sequence[str]) -> Iterator[RunFolder]:
    """The run folder, locked, with the config and its origin in it."""
    config = prepared.config
    assert config.run.dir is not None, "set by the resolve step"
    with RunFolder.open(
        Path(config.run.dir),
        config_yaml=redact_yaml(to_yaml(config)),
        resume_changed=config.run.resume_changed,
    ) as folder:
        write_provenance(folder.path, config_yaml=to_yaml(config), overrides=overrides)
        if config.debug.dump_details is not None:
            prepared.tokenizer.save_pretrained(Path(config.debug.dump_details) / "tokenizer")
        yield folder


@contextmanager
def _open_console(prepared: PreparedRun) -> Iterator[Console]:
    config = prepared.config
    assert config.run.name is not None, "set by the resolve step"
    with open_console(config.logging.console, title=config.run.name, total=prepared.num_rollouts) as console:
        yield console


def _open_store(config: RunConfig, folder: RunFolder) -> CheckpointStore:
    # A run that resumes from a checkpoint relies on their lines of earlier rollouts.
    written = [folder.metrics, *(folder.path / name for name in STEP_FILES)]
    is_renumbered = config.data.start_rollout_id is not None
    place = folder.checkpoint_folder(config.checkpoint, is_renumbered=is_renumbered)
    return CheckpointStore(place, keep_last=config.checkpoint.keep_last, flush_with=written)


def _open_observer(prepared: PreparedRun, folder: RunFolder, console: Console, resume_at_step: int) -> Observer:
    """Writers of metrics, samples and dumps; records from `resume_at_step` on are removed, as they are repeated."""
    config = prepared.config
    metrics = JsonlSink(folder.metrics, resume_at_step=resume_at_step)
    tracked = TrackedRun(
        folder=folder.path,
        config=redact(to_dict(config)),
        resume_at_step=resume_at_step,
        steps_per_rollout=prepared.steps_per_rollout,
        metrics_file=folder.metrics,
        interval=config.logging.interval,
    )
    return Observer(
        console=console,
        sinks=[metrics, *open_trackers(config.logging, tracked, report=console.message, warn=console.warning)],
        diff_limit=diff_limit(
            config.debug.logprob_diff_warn,
            config.train.dtype,
            samples_otherwise=samples_otherwise(config.rollout),
        ),
        # Where a function changes the rewards that are trained, equal ones may become different. A teacher gives a
        # gradient to every sample.
        learns_from_differences=learns_from_differences(config.algo)
        and config.reward.post_process_path is None
        and not uses_teacher(config.algo),
        expects_equal_rewards=has_zero_reward(config.reward),
        files=RolloutFiles(
            dump=RolloutDump(config.debug.save_rollout_data) if config.debug.save_rollout_data is not None else None,
            batches=BatchDump(config.debug.save_train_data) if config.debug.save_train_data is not None else None,
            rollouts=RolloutLog(
                folder.path,
                num_samples=config.logging.num_samples,
                text_of=TokenTexts(prepared.decode, anchor=prepared.tokenizer.encode("a", add_special_tokens=False)),
                resume_at_step=resume_at_step,
            ),
            ledger=StepLines(folder.ledger, resume_at_step=resume_at_step),
            evaluations=EvaluationFiles(folder.path, keep_last=config.eval.keep_last, resume_at=resume_at_step),
            timelines=StepLines(folder.path / TIMELINES_FILE, resume_at_step=resume_at_step)
            if config.logging.num_timelines
            else None,
        ),
    )


def _result(
    folder: RunFolder,
    store: CheckpointStore,
    before: Progress,
    progress: Progress,
    *,
    seconds: float,
    warnings: tuple[str, ...],
) -> RunResult:
    newest = store.latest()
    return RunResult(
        run_dir=folder.path,
        checkpoint=newest.folder if newest is not None else None,
        hf_folder=folder.hf if folder.hf.exists() else None,
        metrics_file=folder.metrics,
        num_rollouts=progress.next_rollout,
        num_before=before.next_rollout,
        num_tokens=progress.num_tokens - before.num_tokens,
        seconds=seconds,
        initial_eval=progress.first_eval,
        final_eval=progress.last_eval,
        objective=progress.last_eval if progress.last_eval is not None else progress.last_reward,
        warnings=warnings,
    )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
