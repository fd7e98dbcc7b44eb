"""Rewards and lengths of all samples, over rollouts."""

from rlscale.observe.report.sections.page_section import Section
from rlscale.observe.report.series import heatmap

SECTION = Section(
    name="distributions",
    title="Rewards and lengths over rollouts",
    label="Distributions",
    data=lambda run: {name: heatmap(run.distributions, name) for name in ("reward", "response_len")},
    scripts=("heatmap.js",),
)
