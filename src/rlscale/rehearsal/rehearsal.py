"""Rehearsal of a run: checks the uncut experiment, then runs it cut, tiny and short on this machine.

uncut config ── rules, files, layout without processes
    └─ cut sizes ── config on GPUs ── launch of every engine process, recorded
         └─ tiny model, generated data ── config on the CPU ── simulated nodes ── rlscale.Trainer ── report
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rlscale.architectures.family import find_family
from rlscale.architectures.hf_config import CONFIG_NAMES, architecture_fields
from rlscale.cluster.simulated_nodes import simulated_nodes
from rlscale.config import Device, RunConfig, load_config
from rlscale.config.passthrough.sglang_python import check_python
from rlscale.config.rules import server_groups
from rlscale.config.user_functions import HOOKS, hook_paths
from rlscale.driver.engines import build_launch
from rlscale.driver.preflight import check_run
from rlscale.driver.substitutes import Substitutes
from rlscale.driver.trainer import RunResult, Trainer
from rlscale.driver.warmup import to_hydra
from rlscale.engines.launch import EngineLaunch
from rlscale.engines.launch_embedded import EmbeddedLaunch
from rlscale.errors import ConfigError, Problem, count_noun
from rlscale.models.byte_tokenizer import NUM_TOKENS
from rlscale.plan import find_hardware, make_plan
from rlscale.plan.model_size import policy_architecture
from rlscale.plan.mtp_layers import MtpLayers
from rlscale.rehearsal.coverage import describe_layout, list_not_rehearsed, list_rehearsed
from rlscale.rehearsal.cut_layout import LayoutSizes, cut_layout, list_cuts, read_sizes
from rlscale.rehearsal.engine_file import engine_file_overrides
from rlscale.rehearsal.first_checks import NOT_NEEDED, check_launch
from rlscale.rehearsal.generated_files import stand_in_data, write_model
from rlscale.rehearsal.launch_record import write_launch_plan
from rlscale.rehearsal.layout_check import check_layout
from rlscale.rehearsal.memory_sampler import PeakMemory, available_bytes, sampled_memory
from rlscale.rehearsal.rehearsal_config import Overrides, cpu_overrides, layout_overrides
from rlscale.rehearsal.rehearsal_launch import RECORD_SUFFIX, RehearsalLaunch
from rlscale.rehearsal.rehearsal_report import RehearsalReport, Row, print_report
from rlscale.rehearsal.rehearsal_reward import RehearsedReward
from rlscale.rehearsal.tiny_family import StageShape, tiny_config_json

PROCESS_BYTES = 600 * 1024**2
"""Private memory of a process with torch and Megatron-core, at most."""

HARDWARE = "h100"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """The configs of a rehearsal."""

    sizes: LayoutSizes  # of the rehearsal
    on_gpus: RunConfig  # the cut layout on GPUs
    config: RunConfig  # what runs here
    model: Path
    generated: tuple[Row, ...]


class Rehearsal:
    """Runs the rehearsal of a config.

    Args:
        config: of the whole run, from `rlscale.load_config` with `on=rehearsal`.
        overrides: the command line, for the record in the run folder.
        console: for progress and report. None: stderr.

    Example:
        Rehearsal(rlscale.load_config(["experiment=qwen3_30b_a3b_gspo", "on=rehearsal"])).run()
    """

    def __init__(self, config: RunConfig, *, overrides: Sequence[str] = (), console: Console | None = None) -> None:
        self.config, self._overrides = config, tuple(overrides)
        self._console = console or Console(stderr=True)

    def run(self) -> RunResult:
        """Runs the rehearsal, prints its report and writes it next to the files of the run.

        Raises:
            ConfigError, DataError: the run would not start, or its layout is wrong.
            WorkerError, EngineError, WeightSyncError, RewardError: as in `Trainer.run`.
        """
        began = time.monotonic()
        generated = check_launch(self.config)
        checked = self._check_uncut()
        stage = self._prepare(generated)
        if stage.sizes.engines:
            write_launch_plan(self.config, stage.model.parent / "launch_plan.json")
        if problems := [each for each in check_run(stage.config) if each.path not in NOT_NEEDED]:
            raise ConfigError(problems)
        self._say_start(stage)
        with simulated_nodes(stage.sizes.cluster_nodes, stage.sizes.gpus_per_node), sampled_memory() as peak:
            substitutes = self._substitutes(stage)
            result = Trainer(stage.config, overrides=self._overrides, is_checked=True, substitutes=substitutes).run()
        _check_records(result.run_dir, stage.sizes)
        report = self._report(stage, checked, peak, seconds=time.monotonic() - began)
        report.write(stage.model.parent)
        print_report(report, self._console)
        self._console.print(f"\n{stage.model.parent}/rehearsal.md", highlight=False, markup=False, soft_wrap=True)
        return result

    def _check_uncut(self) -> list[str]:
        """Lines about the uncut layout. Raises ConfigError where it is wrong."""
        config, a = self.config, policy_architecture(self.config.model)
        report = check_layout(config, a)
        if report.faults:
            fix = "correct the parallel sizes, or the model"
            raise ConfigError(
                [
                    Problem(path="cluster", rule="have a consistent layout", value=each, fix=fix)
                    for each in report.faults
                ]
            )
        lines = list(report.lines)
        if config.cluster.device != Device.cpu:
            over = make_plan(config, find_hardware(HARDWARE)).over_budget
            verdict = "fits" if not over else "does not fit; see rlscale-plan"
            lines.append(f"memory on {HARDWARE}: {verdict}")
        return lines

    def _prepare(self, generated: Sequence[Row]) -> _Stage:
        config = self.config
        sizes = cut_layout(read_sizes(config))
        folder = _fresh_folder(Path(config.run.dir or "runs/rehearsal").absolute())
        layout = layout_overrides(config, sizes) | engine_file_overrides(config, sizes, folder / "engines.yaml")
        # The rules of a run on GPUs hold for the cut layout, too.
        on_gpus = self._load(layout)
        model = folder / "model"
        fields = architecture_fields(
            {name: getattr(config.model, name) for name in CONFIG_NAMES},
            build=config.model.build,
            hf_checkpoint=config.model.hf_checkpoint,
        )
        stages = StageShape.from_core_args(config.megatron.core_args)
        num_mtp = MtpLayers.from_config(config).number
        tiny = tiny_config_json(fields, sizes, vocab_size=NUM_TOKENS, stages=stages, num_mtp=num_mtp)
        write_model(model, tiny, seed=config.train.seed)
        data = stand_in_data(config, folder / "data")
        return _Stage(
            sizes=sizes,
            on_gpus=on_gpus,
            config=self._load(layout | cpu_overrides(config, model, tiny, data) | _router_overrides(config)),
            model=model,
            generated=(*generated, *data.generated.items()),
        )

    def _load(self, overrides: Overrides) -> RunConfig:
        run = self.config.run
        given = [*run.overrides, *(f"{key}={to_hydra(value)}" for key, value in overrides.items())]
        try:
            return load_config(given, config_dir=None if run.config_dir is None else Path(run.config_dir))
        except ConfigError as error:
            raise ConfigError([replace(each, origin="in the rehearsal") for each in error.problems]) from error

    def _substitutes(self, stage: _Stage) -> Substitutes:
        return Substitutes(
            launch=lambda given: _rehearsal_launch(stage, num_threads=given.num_threads),
            reward=RehearsedReward,
        )

    def _say_start(self, stage: _Stage) -> None:
        sizes, left = stage.sizes, available_bytes()
        for name, old, new in list_cuts(read_sizes(self.config), sizes):
            self._say(f"cut: {name} {old} -> {new}")
        needed = sizes.processes * PROCESS_BYTES
        if left is not None and left < needed:
            self._say(f"up to {needed / 1e9:.0f} GB are needed and {left / 1e9:.0f} GB are free", style="yellow")
        ranks = sizes.ranks + sizes.critic_ranks
        started = f"{count_noun(ranks, 'trainer')} and {count_noun(sizes.servers, 'engine server')}"
        self._say(f"starting {started} on {count_noun(sizes.cluster_nodes, 'Ray node')} ...")

    def _say(self, text: str, *, style: str | None = None) -> None:
        self._console.print(f"rehearsal: {text}", style=style, highlight=False, markup=False, soft_wrap=True)

    def _report(self, stage: _Stage, checked: Sequence[str], peak: PeakMemory, *, seconds: float) -> RehearsalReport:
        config, before = self.config, read_sizes(self.config)
        hooks = [hook.key for hook in HOOKS.values() if hook_paths(hook, config) and hook.is_called(config)]
        return RehearsalReport(
            experiment=config.run.experiment or config.run.name or "run",
            layout=describe_layout(config, before),
            rehearsed_layout=describe_layout(config, stage.sizes),
            cuts=tuple(list_cuts(before, stage.sizes)),
            checked=tuple(checked),
            rehearsed=list_rehearsed(config, stage.sizes, hooks),
            not_rehearsed=list_not_rehearsed(
                config,
                stage.sizes,
                is_embedded=_is_embedded(stage),
                routes=bool(stage.config.router.enabled),
            ),
            generated=stage.generated,
            processes=stage.sizes.processes,
            peak_bytes=peak.num_bytes,
            seconds=seconds,
        )


def _rehearsal_launch(stage: _Stage, *, num_threads: int) -> EngineLaunch:
    """The launch of the real run on GPUs, served by the embedded engine or by the scripted one."""
    given = stage.on_gpus
    real = build_launch(given, model_path=str(given.model.hf_checkpoint or given.model.build), num_threads=num_threads)
    shared: Mapping[str, Any] = {
        "name": "engine",
        "model_path": str(stage.model),
        "dtype": "float32",
        "device": "cpu",
        "max_context_len": None,
        "num_threads": num_threads,
        "seed": stage.config.rollout.seed,
    }
    served = EmbeddedLaunch(**shared, num_slots=16, deterministic=False) if _is_embedded(stage) else None
    return RehearsalLaunch(**shared, real=real, served=served)


def _router_overrides(config: RunConfig) -> Overrides:
    """Without sglang-router on this machine requests go to the engines directly."""
    if not config.router.enabled:
        return {}
    absent = check_python(config.sglang.python, serves=False, routes=True, on_cpu=True)
    if absent and server_groups(config):
        raise ConfigError(absent)  # only sglang-router starts with prefill and decode servers
    return {"router.enabled": not absent}


def _is_embedded(stage: _Stage) -> bool:
    fields = architecture_fields({}, build=None, hf_checkpoint=str(stage.model))
    return find_family(fields.get("model_type")).embedded


def _fresh_folder(folder: Path) -> Path:
    """The folder of the rehearsal, without the files of an earlier one.

    Raises:
        ConfigError: it contains a run that is no rehearsal.
    """
    if (folder / "identity.json").exists():
        rule, fix = (
            "be a new folder, or that of an earlier rehearsal",
            "remove it; the rehearsal then has its own folder",
        )
        raise ConfigError([Problem(path="run.dir", rule=rule, value=f"{folder}, which contains a run", fix=fix)])
    for name in ("run", "model", "data"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _check_records(run_dir: Path, sizes: LayoutSizes) -> None:
    """Every server of the layout was launched once."""
    found = len(list((run_dir / "logs").glob(f"*{RECORD_SUFFIX}")))
    assert found == sizes.servers, f"{sizes.servers} engine servers must have been launched, got {found}"
