"""Sweeps: several jobs from one command line, with all combinations of values or values chosen by optuna.

    overrides - parse -> sweeper - overrides of each job -> CheckedLauncher - all valid? -> launcher -> jobs -> records

Hydra would start the first job before it checks the values of the second one, and would stop with the traceback of the
first failure. CheckedLauncher wraps the selected launcher: it checks every job of a batch first, and collects the
record of each job.
"""

from rlscale.config.hydra.sweep.ray_launcher import ShareRay
from rlscale.config.hydra.sweep.records import Direction, JobOutcome, JobRecord, SweepCommand, SweepResult
from rlscale.config.hydra.sweep.run_sweep import RunSweepJob, read_sweep, run_sweep

__all__ = [
    "Direction",
    "JobOutcome",
    "JobRecord",
    "RunSweepJob",
    "ShareRay",
    "SweepCommand",
    "SweepResult",
    "read_sweep",
    "run_sweep",
]
