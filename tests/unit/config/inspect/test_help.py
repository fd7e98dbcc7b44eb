"""Texts of `rlscale-config help` and of the reference pages."""

import pytest

from rlscale.config.inspect.help import group_summary
from rlscale.config.keys import keys


@pytest.mark.parametrize("group", sorted({key.path.rpartition(".")[0] for key in keys().values()} - {""}))
def test_the_summary_of_a_group_is_no_cut_sentence(group: str) -> None:
    assert group_summary(group).endswith(".")
