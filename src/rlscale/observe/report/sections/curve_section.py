"""Curves of metrics."""

from rlscale.observe.report.sections.page_section import Section

SECTION = Section(
    name="curves",
    title="Curves",
    label="Curves",
    # Other sections read the metrics, too: they are an entry of the page.
    data=lambda run: None,
    scripts=("charts.js",),
    template="curves.html.jinja",
)
