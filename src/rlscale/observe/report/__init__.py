"""Renders a run folder as one HTML page that needs no network: `rlscale-report`."""

from rlscale.observe.report.page import render
from rlscale.observe.report.run_reader import RunData, read_run

__all__ = ["RunData", "read_run", "render"]
