"""Samples token by token."""

from rlscale.observe.report.sections.page_section import Section

SECTION = Section(
    name="samples",
    title="Samples",
    label="Samples",
    data=lambda run: {"samples": list(run.samples), "number": run.num_samples},
    scripts=("samples.js",),
    template="samples.html.jinja",
)
