"""Trackers: sinks of third-party libraries. Each library is imported only if its tracker is enabled."""
