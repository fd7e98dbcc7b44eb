"""Entry point of the library: `rlscale.Trainer`, which the command `rlscale-train` calls, too.

Example:
    config = rlscale.load_config(["+experiment=quickstart", "data.num_rollout=20"])
    result = rlscale.Trainer(config).run()
    print(result.final_eval, result.hf_folder)
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlscale.checkpoint.run_folder import RunFolder
from rlscale.checkpoint.store import CheckpointStore
from rlscale.cluster.ray_session import RaySession, ray_session
from rlscale.config import Device, RunConfig, mixes_caches, to_dict, to_yaml
from rlscale.control.ci_checks import check_metric
from rlscale.control.loop_config import Progress
from rlscale.control.oom_advice import with_memory_advice
from rlscale.control.signals import cancellation_as_interrupt
from rlscale.driver.preflight import check_files
from rlscale.driver.prepared_run import PreparedRun, prepare_run
from rlscale.driver.run import ResumePoint, Run
from rlscale.driver.trainer_spec import starting_weights
from rlscale.driver.warmup import warmup_config
from rlscale.errors import ConfigError, EngineError, WorkerError
from rlscale.models.resolve_model import is_hf_folder, resolve_model
from rlscale.observe.console import Console, open_console
from rlscale.observe.dumps import BatchDump, RolloutDump
from rlscale.observe.jsonl import JsonlSink, read_records
from rlscale.observe.provenance import write_provenance
from rlscale.observe.reporter import Observer, diff_limit
from rlscale.observe.rollout_log import DISTRIBUTIONS_FILE, SAMPLES_FILE, RolloutLog, TokenTexts
from rlscale.observe.trackers import TrackedRun, open_trackers
from rlscale.plan.placement import build_layout
from rlscale.secrets import redact, redact_yaml


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
    """

    def __init__(self, config: RunConfig, *, overrides: Sequence[str] = (), session: RaySession | None = None) -> None:
        self.config, self._overrides, self._session = config, tuple(overrides), session

    def run(self) -> RunResult:
        """Trains, and returns the places of everything it wrote.

        Raises:
            ConfigError, DataError: found before any trainer or engine was started.
            WorkerError, EngineError, WeightSyncError, RewardError: the first cause of a failure, after every process
                of the run has ended.
        """
        config = self.config
        with ExitStack() as stack:
            session = self._session or stack.enter_context(_checked_session(config))
            # Tokenizer and data are read while Ray starts.
            prepared = prepare_run(config, _starting_model(config, session))
            session.wait()
            folder = stack.enter_context(_open_folder(prepared, self._overrides))
            console = stack.enter_context(_open_console(prepared))
            store = _open_store(config, folder)
            start = _find_resume_point(config, folder, store, console)
            before = replace(start.progress)  # a copy: the run may advance the original
            with closing(_open_observer(prepared, folder, console, before.next_rollout)) as observer:
                run = Run(prepared, folder=folder, store=store, observer=observer)
                began = time.perf_counter()
                try:
                    with cancellation_as_interrupt():
                        progress = asyncio.run(run.run(start))
                except (WorkerError, EngineError) as error:
                    raise with_memory_advice(error, config) from error
            seconds = time.perf_counter() - began
            result = _result(folder, store, before, progress, seconds=seconds, warnings=tuple(observer.warnings))
            folder.finish({name: _plain(value) for name, value in asdict(result).items()})
            if config.ci.enabled:
                check_metric(config.ci, read_records(folder.metrics))
            return result


@contextmanager
def _checked_session(config: RunConfig) -> Iterator[RaySession]:
    """Ray for one run, after its files are checked."""
    problems = check_files(config)
    if problems and config.cluster.device != Device.cuda:
        raise ConfigError(problems)
    with ray_session(config.cluster, build_layout(config)) as session:
        # With GPUs Ray starts all the same: too few of them are one more problem, reported together with the others.
        if problems:
            try:
                session.wait()
            except ConfigError as error:
                raise ConfigError([*problems, *error.problems]) from None
            raise ConfigError(problems)
        yield session


def _starting_model(config: RunConfig, session: RaySession) -> str:
    """The Hugging Face folder or hub id of the starting weights; runs the warm-up if it has not run yet."""
    load = config.checkpoint.load
    if load is not None and is_hf_folder(load):
        return resolve_model(replace(config.model, build=None, hf_checkpoint=load))
    warmup = warmup_config(config)
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
    # A checkpoint records the length of these files, so that a resumed run cuts them there.
    written = [folder.metrics, folder.path / SAMPLES_FILE, folder.path / DISTRIBUTIONS_FILE]
    place = folder.checkpoint_folder(config.checkpoint)
    return CheckpointStore(place, keep_last=config.checkpoint.keep_last, flush_with=written)


def _find_resume_point(config: RunConfig, folder: RunFolder, store: CheckpointStore, console: Console) -> ResumePoint:
    """The checkpoint of an unfinished run in the folder, else `checkpoint.load`, else the model."""
    if folder.skipped is not None:
        console.message(f"{folder.skipped} contains a finished run; this run uses {folder.path}")
    if folder.changed:
        console.message(f"{folder.path} resumes with a changed config: {'; '.join(folder.changed)}")
    checkpoint = store.latest() if folder.resumed else None
    load = config.checkpoint.load
    if checkpoint is None and load is not None and not is_hf_folder(load) and starting_weights(config) is None:
        checkpoint = CheckpointStore.resolve(load)
    if checkpoint is not None:
        console.message(f"resuming from {checkpoint.folder} (rollout {checkpoint.rollout_id})")
    elif starting_weights(config) is not None:
        console.message(f"starting from the weights in {load}")
    elif folder.resumed:
        console.message(f"{folder.path} contains a run without a checkpoint; it starts from the beginning")
    start, first = ResumePoint.from_checkpoint(checkpoint), config.data.start_rollout_id
    is_resumed = folder.resumed and checkpoint is not None
    return start if first is None or is_resumed else start.renumbered(first)


def _open_observer(prepared: PreparedRun, folder: RunFolder, console: Console, resume_at_step: int) -> Observer:
    """Writers of metrics, samples and dumps; records from `resume_at_step` on are removed, as they are repeated."""
    config = prepared.config
    assert config.batch.num_steps_per_rollout is not None, "set by the resolve step"
    metrics = JsonlSink(folder.metrics, resume_at_step=resume_at_step)
    tracked = TrackedRun(
        folder=folder.path,
        config=redact(to_dict(config)),
        resume_at_step=resume_at_step,
        steps_per_rollout=config.batch.num_steps_per_rollout,
        metrics_file=folder.metrics,
        interval=config.logging.interval,
    )
    return Observer(
        console=console,
        sinks=[metrics, *open_trackers(config.logging, tracked, report=console.message, warn=console.warning)],
        diff_limit=diff_limit(
            config.debug.logprob_diff_warn, config.train.dtype, mixes_caches=mixes_caches(config.rollout)
        ),
        dump=RolloutDump(config.debug.save_rollout_data) if config.debug.save_rollout_data is not None else None,
        batches=BatchDump(config.debug.save_train_data) if config.debug.save_train_data is not None else None,
        rollouts=RolloutLog(
            folder.path,
            num_samples=config.logging.num_samples,
            text_of=TokenTexts(prepared.decode, anchor=prepared.tokenizer.encode("a", add_special_tokens=False)),
            resume_at_step=resume_at_step,
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
