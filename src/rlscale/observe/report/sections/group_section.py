"""Comparison of the trajectories of one group. The group is one of those with timelines."""

from rlscale.observe.report.sections.page_section import Section

SECTION = Section(
    name="groups",
    title="Comparison within a group",
    label="Groups",
    # The timelines of `lanes` have the groups.
    data=lambda run: None,
    scripts=("groups.js",),
    styles=("groups.css",),
)
