"""What a run will do, told before it is started: batches, places, memory, traffic and the least time a step can take.

Arithmetic on a resolved config alone; imports neither torch nor Ray.
"""

from rlscale.plan.hardware import HARDWARE, Hardware, hardware_named
from rlscale.plan.plan import Plan, make_plan, parts_not_built
from rlscale.plan.suggestions import Fix, find_fixes

__all__ = ["HARDWARE", "Fix", "Hardware", "Plan", "find_fixes", "hardware_named", "make_plan", "parts_not_built"]
