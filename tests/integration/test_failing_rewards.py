"""Training with rewards that fail at random reaches the held-out reward of training without failures."""

import json
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import pytest

from tests.integration.conftest import Command

SEEDS = range(1, 6)
T_975 = 2.776
"""97.5 % quantile of Student's t with 4 degrees of freedom."""

REWARD = """
import json
import random
from pathlib import Path

from rlscale.rewards.builtin import exact_match

ROWS = (json.loads(line) for line in Path(HELD_OUT).read_text().splitlines())
PAIRS = {(row["metadata"]["a"], row["metadata"]["b"]) for row in ROWS}


def score(sample, custom):
    row = sample.prompt.metadata
    # The same sample fails again: no retry succeeds. Held-out rewards never fail, so that they are comparable.
    if (row["a"], row["b"]) not in PAIRS and random.Random(sample.seed).random() < custom["failing"]:
        raise ConnectionError("no answer")
    return exact_match(sample)
"""


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_thirty_percent_of_failing_rewards_change_no_final_reward(command: Command) -> None:
    data = Path(__file__).parents[2] / "data" / "arithmetic"
    (command.folder / "my_reward.py").write_text(REWARD.replace("HELD_OUT", repr(str(data / "heldout.jsonl"))))
    differences = []
    for seed in SEEDS:
        final = {}
        for failing in (0.0, 0.3):
            command.name = f"seed-{seed}-{failing}"
            done = command.run(
                "reward.custom_path=my_reward:score",
                "reward.max_retries=0",
                f"++custom.failing={failing}",
                f"train.seed={seed}",
                f"rollout.seed={seed}",
                "eval.stop_reward=null",
                "eval.interval=35",
                "eval.n_samples_per_prompt=4",
                small=False,
                timeout_s=900,
            )
            assert done.code == 0, done.err
            final[failing] = json.loads((command.run_dir / "finished.json").read_text())["final_eval"]
            shares = [m.get("trajectories/failed_share", 0.0) for m in command.metrics() if "train/loss" in m]
            assert fmean(shares) == pytest.approx(failing, abs=0.02)
        differences.append(final[0.3] - final[0.0])
    half = T_975 * stdev(differences) / sqrt(len(differences))
    print(f"paired differences {differences}, mean {fmean(differences):.4f} +- {half:.4f}")
    assert abs(fmean(differences)) <= half, differences
    assert abs(fmean(differences)) + half <= 0.03, differences
