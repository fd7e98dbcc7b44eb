"""Trackers: sinks of third-party libraries. Each library is imported only if its tracker is enabled."""

from rlscale.observe.trackers.check_trackers import check_trackers
from rlscale.observe.trackers.open_trackers import TrackedRun, open_trackers

__all__ = ["TrackedRun", "check_trackers", "open_trackers"]
