"""A sweeper that lets optuna choose the values: `-m hydra/sweeper=optuna`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from rlscale.config.hydra.sweep.expand import as_override, interval_ends
from rlscale.config.hydra.sweep.records import Direction
from rlscale.config.problems import COMMAND_LINE
from rlscale.errors import Problem

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

TARGET = "rlscale.config.hydra.sweep.optuna_sweeper.OptunaSweeper"


class SamplerName(StrEnum):
    """The samplers of optuna."""

    tpe = "tpe"
    random = "random"


@dataclass(kw_only=True)
class OptunaConfig:
    """Keys of `hydra.sweeper` with `hydra/sweeper=optuna`."""

    _target_: str = TARGET
    n_trials: int = 20  # total number of jobs
    n_jobs: int = 1  # jobs chosen at once; a parallel launcher runs them together
    direction: Direction = Direction.maximize
    sampler: SamplerName = SamplerName.tpe
    seed: int = 42  # of the sampler
    params: dict[str, str] = field(default_factory=dict)  # key -> values, as on the command line; for YAML files


def register_sweeper() -> None:
    """Registers `hydra/sweeper=optuna`; must run after Hydra's search for plugins, one of which may have that name."""
    ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=OptunaConfig, provider="rlscale")


def count_problems(fields: DictConfig) -> list[Problem]:
    """Problems of numbers of jobs below 1."""
    return [
        Problem(
            path=f"hydra.sweeper.{name}", rule="be at least 1", value=str(fields[name]), fix=fix, origin=COMMAND_LINE
        )
        for name, fix in (
            ("n_trials", "it is the number of jobs"),
            ("n_jobs", "it is the number of jobs chosen at once"),
        )
        if fields[name] < 1
    ]


class OptunaSweeper(Sweeper):
    """Gets values from optuna, `n_jobs` sets at a time, runs the jobs, and reports their objectives to optuna.

    Values have Hydra's syntax: `a,b`, `choice(a,b)`, `range(1,9)`, `interval(0.1,0.9)`,
    `tag(log, interval(1e-6,1e-3))`.
    A failed job is reported as failed, without an objective.
    """

    def __init__(self, **values: Any) -> None:
        """Args: values: the fields of OptunaConfig."""
        self._config = OptunaConfig(**values)
        self.study: optuna.Study | None = None
        self.launcher: Launcher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._hydra = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        # A slow import that only this sweeper needs.
        import optuna

        folder = Path(str(self._hydra.hydra.sweep.dir))
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self._hydra, folder / "multirun.yaml")
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        # Arguments come last: they replace values from YAML files.
        texts = [f"{key}={value}" for key, value in self._config.params.items()] + list(arguments)
        overrides = {override.key_or_group: override for override in parser.parse_overrides(texts)}
        fixed = [as_override(each) for each in overrides.values() if not each.is_sweep_override()]
        space = {_name(each): as_distribution(each) for each in overrides.values() if each.is_sweep_override()}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(direction=self._config.direction.value, sampler=_sampler(self._config))
        num_done = 0
        while num_done < self._config.n_trials:
            number = min(self._config.n_jobs, self._config.n_trials - num_done)
            self._run_batch(self.study, fixed, space, number=number)
            num_done += number

    def _run_batch(
        self, study: optuna.Study, fixed: Sequence[str], space: Mapping[str, BaseDistribution], *, number: int
    ) -> None:
        # A slow import, see above.
        from optuna.trial import TrialState

        trials = [study.ask(dict(space)) for _ in range(number)]
        jobs = [[*fixed, *(f"{name}={_text(value)}" for name, value in trial.params.items())] for trial in trials]
        returns = self.launcher.launch(jobs, initial_job_idx=trials[0].number)
        for trial, job in zip(trials, returns, strict=True):
            objective = float(job.return_value)
            if math.isnan(objective):
                study.tell(trial, state=TrialState.FAIL)
            else:
                study.tell(trial, objective)


def as_distribution(override: Override) -> BaseDistribution:
    """The distribution of an override with several values.

    Example:
        `optim.lr=tag(log, interval(1e-6, 1e-3))`  ->  FloatDistribution(1e-6, 1e-3, log=True)
    """
    # A slow import, see above.
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, IntervalSweep):
        (low, high), log = interval_ends(override), "log" in value.tags
        if isinstance(low, int) and isinstance(high, int):
            return IntDistribution(low, high, log=log)
        return FloatDistribution(float(low), float(high), log=log)
    texts = list(override.sweep_string_iterator())
    if isinstance(value, RangeSweep) and not value.shuffle and len(texts) > 1:
        numbers = sorted(float(text) for text in texts)
        if all(number.is_integer() for number in numbers):
            return IntDistribution(int(numbers[0]), int(numbers[-1]), step=int(numbers[1] - numbers[0]))
        return FloatDistribution(numbers[0], numbers[-1], step=numbers[1] - numbers[0])
    return CategoricalDistribution(texts)


def _sampler(config: OptunaConfig) -> optuna.samplers.BaseSampler:
    # A slow import, see above.
    from optuna.samplers import RandomSampler, TPESampler

    if config.sampler == SamplerName.random:
        return RandomSampler(seed=config.seed)
    # constant_liar makes values that are chosen at once differ.
    return TPESampler(seed=config.seed, constant_liar=config.n_jobs > 1)


def _name(override: Override) -> str:
    """The key with the `+` of Hydra's syntax."""
    return str(override.get_key_element())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
