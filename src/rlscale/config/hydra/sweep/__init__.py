"""Several jobs from one command line: combinations of values, or values that optuna chooses.

    words ─ parse ─> sweeper ─ words of each job ─> CheckedLauncher ─ all right? ─> launcher ─> jobs ─> records

Hydra would start the first job before it looks at the second one's values, and would end with the first failure's
traceback. So a launcher of ours stands before the one that was chosen: it checks every job of a batch first, and it
collects what each job made of itself.
"""

from rlscale.config.hydra.sweep.records import Direction, JobRecord, Outcome, SweepResult
from rlscale.config.hydra.sweep.run_sweep import RunLoaded, run_sweep

__all__ = ["Direction", "JobRecord", "Outcome", "RunLoaded", "SweepResult", "run_sweep"]
