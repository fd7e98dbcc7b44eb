"""The plan of a run, which `rlscale-plan` prints: batches, placement, memory, traffic and a lower bound of its time.

Arithmetic on a resolved config alone; imports neither torch nor Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlscale.plan.hardware import HARDWARE, Hardware, find_hardware

if TYPE_CHECKING:
    from rlscale.plan.plan import Plan, find_refused, make_plan
    from rlscale.plan.suggestions import Suggestion, find_suggestions

__all__ = [
    "HARDWARE",
    "Hardware",
    "Plan",
    "Suggestion",
    "find_hardware",
    "find_refused",
    "find_suggestions",
    "make_plan",
]

_MODULES = {
    "Plan": "rlscale.plan.plan",
    "Suggestion": "rlscale.plan.suggestions",
    "find_suggestions": "rlscale.plan.suggestions",
    "find_refused": "rlscale.plan.plan",
    "make_plan": "rlscale.plan.plan",
}


def __getattr__(name: str) -> Any:
    """Imports what needs the rules of the config on first use (PEP 562): ranks read only the data sheets of GPUs."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, which are not all imported yet."""
    return sorted({*globals(), *__all__})
