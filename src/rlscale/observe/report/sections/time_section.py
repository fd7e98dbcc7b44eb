"""Time by phase, of the whole run and of each step."""

from rlscale.observe.report.sections.page_section import Section
from rlscale.observe.report.series import phase_seconds

SECTION = Section(
    name="time",
    title="Time by phase",
    label="Time",
    data=lambda run: phase_seconds(run.metrics),
    scripts=("phases.js",),
)
