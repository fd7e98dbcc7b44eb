"""What a run will do, told before it is started: batches, places, memory, traffic and the least time a step can take.

Arithmetic on a resolved config alone; imports neither torch nor Ray.
"""

from rlscale.plan.architecture import Architecture
from rlscale.plan.hardware import HARDWARE, Hardware

__all__ = ["HARDWARE", "Architecture", "Hardware"]
