"""The plan of a run, which `rlscale-plan` prints: batches, placement, memory, traffic and a lower bound of its time.

Arithmetic on a resolved config alone; imports neither torch nor Ray.
"""

from rlscale.plan.hardware import HARDWARE, Hardware, find_hardware
from rlscale.plan.plan import Plan, find_unsupported, make_plan
from rlscale.plan.suggestions import Suggestion, find_suggestions

__all__ = [
    "HARDWARE",
    "Hardware",
    "Plan",
    "Suggestion",
    "find_hardware",
    "find_suggestions",
    "find_unsupported",
    "make_plan",
]
