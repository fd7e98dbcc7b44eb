"""Every option wins over every experiment and overlay.

One process each, but too slow for tests/unit, which tests every option with one experiment and one overlay.
"""

import pytest

from tests.unit.config.options import EXPERIMENTS, GROUPS, assert_wins, selections


@pytest.mark.nightly
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_option_wins_over_every_experiment(experiment: str) -> None:
    for chosen in selections():
        assert_wins(chosen, f"experiment={experiment}")


@pytest.mark.nightly
@pytest.mark.parametrize("overlay", GROUPS["on"])
def test_every_option_wins_over_every_overlay(overlay: str) -> None:
    for chosen in selections():
        assert_wins(chosen, "experiment=deepseek_r1", f"on={overlay}")
