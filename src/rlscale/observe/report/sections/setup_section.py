"""Starts of the run and its configuration."""

from rlscale.observe.report.sections.page_section import Section

SECTION = Section(
    name="setup",
    title="Setup",
    label="Setup",
    data=lambda run: None,
    template="setup.html.jinja",
)
