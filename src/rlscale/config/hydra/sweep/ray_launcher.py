"""The launcher `hydra/launcher=ray`: jobs in processes of this machine that share one Ray.

A job is a whole run with a driver. The drivers are processes of joblib; what they start is placed by the Ray that the
sweep joins or starts before the first job. The public hydra-ray-launcher runs each job inside a task of Ray instead:
decision 0017 says why that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, read_write

from rlscale.config.hydra.sweep.separate_jobs import SeparateJobs
from rlscale.config.problems import COMMAND_LINE
from rlscale.config.rules.conditions import shares_base
from rlscale.config.run_config import RunConfig
from rlscale.errors import ConfigError, Problem

NAME = "ray"

ShareRay = Callable[[Sequence[RunConfig], int], AbstractContextManager[int]]
"""Joins or starts the Ray of all jobs, given their configs and the number of jobs at a time, 0 if that is open.

Gives the number of jobs that fit at a time. Ray belongs to `cluster`, which imports this package.
"""


@dataclass(kw_only=True)
class RayLauncherConfig:
    """Keys of `hydra.launcher` with `hydra/launcher=ray`."""

    # Hydra instantiates only launchers of the package hydra_plugins, and this one adds nothing to the class.
    _target_: str = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
    n_jobs: int = 0  # jobs at a time; 0: as many as fit


def register_launcher() -> None:
    """Registers `hydra/launcher=ray`; must run after Hydra's search for plugins, one of which may have that name."""
    ConfigStore.instance().store(group="hydra/launcher", name=NAME, node=RayLauncherConfig, provider="rlscale")


@contextmanager
def shared_ray(master: DictConfig, configs: Sequence[RunConfig], share_ray: ShareRay | None) -> Iterator[None]:
    """One Ray for the jobs started inside, if the sweep has this launcher; sets `hydra.launcher.n_jobs`.

    Args:
        master: the config of the sweep.
        configs: of the jobs that are known.
        share_ray: None: jobs do not use Ray.
    """
    if master.hydra.runtime.choices["hydra/launcher"] != NAME:
        _check_nothing_shared(configs)
        yield
        return
    given = int(master.hydra.launcher.n_jobs)
    if given < 0:
        fix = "0 runs as many as fit"
        path, rule = "hydra.launcher.n_jobs", "be at least 0"
        raise ConfigError([Problem(path=path, rule=rule, value=str(given), fix=fix, origin=COMMAND_LINE)])
    with share_ray(configs, given) if share_ray else nullcontext(1) as number:
        with read_write(master):
            master.hydra.launcher.n_jobs = given or number
        yield


def separated(master: DictConfig, launcher: Launcher) -> Launcher:
    """The launcher of a sweep; with `hydra/launcher=ray` a job whose process dies leaves the others running."""
    if master.hydra.runtime.choices["hydra/launcher"] != NAME:
        return launcher
    return SeparateJobs(launcher, num_at_once=int(master.hydra.launcher.n_jobs))


def _check_nothing_shared(configs: Sequence[RunConfig]) -> None:
    """Raises ConfigError where jobs want to share engines, which needs one Ray."""
    if any(shares_base(config) for config in configs):
        rule, fix = "be false in a sweep without hydra/launcher=ray", f"add hydra/launcher={NAME}, or set it to false"
        problem = Problem(path="train.lora.shared_base", rule=rule, value="true", fix=fix, origin=COMMAND_LINE)
        raise ConfigError([problem])
