"""The library's way to run a training: what the command `rlscale-train` calls.

Example:
    config = rlscale.load_config(["+experiment=quickstart", "data.num_rollout=20"])
    result = rlscale.Trainer(config).run()
    print(result.final_eval, result.hf_folder)
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlscale.checkpoint.run_folder import RunFolder
from rlscale.checkpoint.store import CheckpointStore
from rlscale.cluster.ray_session import RaySession, ray_session
from rlscale.config import Device, RunConfig, mixes_caches, to_dict, to_yaml
from rlscale.control.ci_checks import check_metric
from rlscale.control.oom_advice import with_memory_advice
from rlscale.control.signals import run_interruptibly
from rlscale.driver.preflight import check_files
from rlscale.driver.prepare import PreparedRun, prepare_run
from rlscale.driver.run import Run, Start
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
from rlscale.plan.placement import layout_of
from rlscale.secrets import redact, redact_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a finished run left behind."""

    run_dir: Path
    checkpoint: Path | None  # newest one
    hf_folder: Path | None  # final export, which transformers loads
    metrics_file: Path
    num_rollouts: int  # of the whole run
    num_before: int  # of them, by earlier starts
    num_tokens: int  # generated for training (SFT: trained on) by this start
    seconds: float  # of the loop of this start, without what comes before it
    initial_eval: float | None  # mean held-out reward before the first rollout
    final_eval: float | None
    objective: float | None  # final_eval, else the mean reward of the last rollout
    warnings: tuple[str, ...] = ()


class Trainer:
    """Runs one resolved config from start to end in this process.

    Args:
        config: from `rlscale.load_config`.
        overrides: what the user typed, for the record in the run folder.
    """

    def __init__(self, config: RunConfig, *, overrides: Sequence[str] = ()) -> None:
        self.config, self._overrides = config, tuple(overrides)

    def run(self) -> RunResult:
        """Trains, and returns where everything is.

        Raises:
            ConfigError, DataError: found before any trainer or engine was started.
            WorkerError, EngineError, WeightSyncError, RewardError: the first cause of a failure, after every process
                of the run was ended.
        """
        config = self.config
        layout = layout_of(config)
        problems = check_files(config)
        if problems and config.cluster.device != Device.cuda:
            raise ConfigError(problems)
        with ExitStack() as stack:
            session = stack.enter_context(ray_session(config.cluster, layout))
            if problems:
                try:
                    session.wait()
                except ConfigError as error:
                    raise ConfigError([*problems, *error.problems]) from None
                raise ConfigError(problems)
            return _run(config, session, overrides=self._overrides)


def _run(config: RunConfig, session: RaySession, *, overrides: Sequence[str]) -> RunResult:
    """One run inside a Ray session; calls itself for the warm-up."""
    plan = prepare_run(config, _starting_model(config, session))
    session.wait()
    assert config.run.name is not None, "set by the resolve step"
    with ExitStack() as stack:
        folder = stack.enter_context(_open_folder(config))
        write_provenance(folder.path, config_yaml=to_yaml(config), overrides=overrides)
        if config.debug.dump_details is not None:
            plan.tokenizer.save_pretrained(Path(config.debug.dump_details) / "tokenizer")
        console = stack.enter_context(
            open_console(config.logging.console, title=config.run.name, total=plan.num_rollouts)
        )
        return _train(plan, folder, console)


def _open_folder(config: RunConfig) -> RunFolder:
    assert config.run.dir is not None, "set by the resolve step"
    return RunFolder.open(
        Path(config.run.dir),
        config_yaml=redact_yaml(to_yaml(config)),
        resume_changed=config.run.resume_changed,
    )


def _train(plan: PreparedRun, folder: RunFolder, console: Console) -> RunResult:
    config = plan.config
    place = folder.checkpoint_folder(config.checkpoint)
    written = [folder.metrics, folder.path / SAMPLES_FILE, folder.path / DISTRIBUTIONS_FILE]
    store = CheckpointStore(place, keep_last=config.checkpoint.keep_last, flush_with=written)
    start = _find_start(config, folder, store, console)
    observer = _open_observer(plan, folder, console, resume_at_step=start.progress.next_rollout)
    began, tokens_before, rollouts_before = (
        time.perf_counter(),
        start.progress.num_tokens,
        start.progress.next_rollout,
    )
    try:
        progress = run_interruptibly(Run(plan, folder=folder, store=store, observer=observer).run(start))
    except (WorkerError, EngineError) as error:
        raise with_memory_advice(error, config) from error
    finally:
        observer.close()
    newest = store.latest()
    result = RunResult(
        run_dir=folder.path,
        checkpoint=newest.folder if newest is not None else None,
        hf_folder=folder.hf if folder.hf.exists() else None,
        metrics_file=folder.metrics,
        num_rollouts=progress.next_rollout,
        num_before=rollouts_before,
        num_tokens=progress.num_tokens - tokens_before,
        seconds=time.perf_counter() - began,
        initial_eval=progress.first_eval,
        final_eval=progress.last_eval,
        objective=progress.last_eval if progress.last_eval is not None else progress.last_reward,
        warnings=tuple(observer.warnings),
    )
    folder.finish({name: _plain(value) for name, value in asdict(result).items()})
    if config.ci.enabled:
        check_metric(config.ci, read_records(folder.metrics))
    return result


def _open_observer(plan: PreparedRun, folder: RunFolder, console: Console, *, resume_at_step: int) -> Observer:
    """Everything that records the run, cut or told to go on at `resume_at_step`."""
    config = plan.config
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
        sinks=[metrics, *open_trackers(config.logging, tracked, tell=console.message, warn=console.warning)],
        diff_limit=diff_limit(
            config.debug.logprob_diff_warn, config.train.dtype, mixes_caches=mixes_caches(config.rollout)
        ),
        dump=RolloutDump(config.debug.save_rollout_data) if config.debug.save_rollout_data is not None else None,
        batches=BatchDump(config.debug.save_train_data) if config.debug.save_train_data is not None else None,
        rollouts=RolloutLog(
            folder.path,
            num_samples=config.logging.num_samples,
            text_of=TokenTexts(plan.decode, anchor=plan.tokenizer.encode("a", add_special_tokens=False)),
            resume_at_step=resume_at_step,
        ),
    )


def _find_start(config: RunConfig, folder: RunFolder, store: CheckpointStore, console: Console) -> Start:
    """Where to begin: at the checkpoint of an unfinished run in the folder, at `checkpoint.load`, or at the model."""
    if folder.skipped is not None:
        console.message(f"{folder.skipped} holds a finished run; this one goes to {folder.path}")
    if folder.changed:
        console.message(f"{folder.path} goes on with another config: {'; '.join(folder.changed)}")
    checkpoint = store.latest() if folder.resumed else None
    load = config.checkpoint.load
    if checkpoint is None and load is not None and not is_hf_folder(load) and starting_weights(config) is None:
        checkpoint = CheckpointStore.resolve(load)
    if checkpoint is not None:
        console.message(f"going on from {checkpoint.folder} (rollout {checkpoint.rollout_id})")
    elif starting_weights(config) is not None:
        console.message(f"starting from the weights in {load}")
    elif folder.resumed:
        console.message(f"{folder.path} holds a run without a checkpoint yet, which begins anew")
    start, first = Start.at(checkpoint), config.data.start_rollout_id
    goes_on = folder.resumed and checkpoint is not None
    return start if first is None or goes_on else start.moved_to(first)


def _starting_model(config: RunConfig, session: RaySession) -> str:
    """The Hugging Face folder or hub id whose weights the run starts from; runs the warm-up when it has none yet."""
    load = config.checkpoint.load
    if load is not None and is_hf_folder(load):
        return resolve_model(replace(config.model, build=None, hf_checkpoint=load))
    warmup = warmup_config(config)
    if warmup is None:
        return resolve_model(config.model)
    assert warmup.run.dir is not None
    folder = Path(warmup.run.dir)
    if not (folder / "finished.json").exists():
        _run(warmup, session, overrides=())
    return str(folder / "hf")


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
