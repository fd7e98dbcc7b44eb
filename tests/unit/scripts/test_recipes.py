"""The page of recipes has a verdict for every recipe and every GPU."""

import pytest

from rlscale.config import load_config_with_notes
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.plan import find_hardware, make_plan
from scripts.docs.recipes import HARDWARE, make_recipes_page, verdict
from tests.recipes import AGENT_EXAMPLES


@pytest.mark.slow
def test_every_recipe_has_a_row_with_a_verdict_for_each_gpu() -> None:
    rows = [line.strip("| ").split(" | ") for line in make_recipes_page().splitlines() if line.startswith("| `")]
    larger = [f"{name} on=qwen3_4b" for name in AGENT_EXAMPLES]
    assert [row[0].strip("`") for row in rows] == [*ConfigFolders.find().groups()["experiment"], *larger]
    assert len({len(row) for row in rows}) == 1
    assert all(cell.startswith(("fits", "does not fit: ")) for row in rows for cell in row[6 : 6 + len(HARDWARE)])


@pytest.mark.parametrize(("model", "expected"), [("qwen3_4b", "fits"), ("qwen3_32b", "does not fit: GPU of a trainer")])
@pytest.mark.slow
def test_a_verdict_gives_the_reason_and_a_change(model: str, expected: str) -> None:
    overrides = ["experiment=qwen3_4b_grpo", f"model={model}", "cluster.device=cuda"]
    loaded = load_config_with_notes(overrides, to_run=False)
    text = verdict(loaded, make_plan(loaded.config, find_hardware("h100")))
    assert text.startswith(expected) and (text == "fits" or " GiB of 80 GiB; fits with `" in text)
