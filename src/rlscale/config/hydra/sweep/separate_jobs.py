"""Jobs of a sweep in processes that do not end together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from joblib.externals.loky import ProcessPoolExecutor


class SeparateJobs(Launcher):
    """Runs each job of the joblib launcher in a separate pool: joblib ends all jobs when the process of one dies."""

    def __init__(self, inner: Any, *, num_at_once: int) -> None:
        """Args: inner: joblib's launcher, which runs the one job of each process there."""
        self._inner, self._num_at_once = inner, num_at_once
        self._pools: set[ProcessPoolExecutor] = set()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._inner.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Raises BrokenProcessPool once all jobs have ended, if the process of one has died."""
        if self._num_at_once == 1:
            found: Sequence[JobReturn] = self._inner.launch(job_overrides, initial_job_idx)
            return found
        state = Singleton.get_state()
        with ThreadPoolExecutor(self._num_at_once, thread_name_prefix="job") as threads:
            jobs = [
                threads.submit(self._run, list(overrides), index, state)
                for index, overrides in enumerate(job_overrides, initial_job_idx)
            ]
            try:
                return _results(jobs)
            except BaseException:
                # Ctrl-C: the processes of the jobs end with the sweep.
                for job in jobs:
                    job.cancel()
                for pool in list(self._pools):
                    pool.shutdown(wait=False, kill_workers=True)
                raise

    def _run(self, overrides: list[str], index: int, state: Any) -> JobReturn:
        # Loads NumPy, which the check of a sweep does without.
        from joblib.externals.loky import ProcessPoolExecutor

        pool = ProcessPoolExecutor(max_workers=1)
        self._pools.add(pool)
        try:
            done: JobReturn = pool.submit(_launch_one, self._inner, overrides, index, state).result()
            return done
        finally:
            self._pools.discard(pool)
            pool.shutdown(wait=False)


def _launch_one(launcher: Any, overrides: list[str], index: int, state: Any) -> JobReturn:
    """Runs one job in its process."""
    Singleton.set_state(state)
    launcher.joblib = {"n_jobs": 1}
    (done,) = launcher.launch([overrides], index)
    result: JobReturn = done
    return result


def _results(jobs: Sequence[Future[JobReturn]]) -> list[JobReturn]:
    """The results of all jobs; a process that died is reported when the others have ended."""
    broken: BrokenProcessPool | None = None
    for job in jobs:
        try:
            job.result()
        except BrokenProcessPool as error:
            broken = error
    if broken is not None:
        raise broken
    return [job.result() for job in jobs]
