"""A new advantage estimator is a function, an entry of the table and a member of the enum, and nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import rlscale
from rlscale.config.hydra.config_folders import packaged_folder

MEDIAN = '''

def from_median(inputs: AdvantageInputs) -> Advantages:
    """A_t = reward - median of the rollout."""
    scores_S = inputs.rewards_S - inputs.rewards_S.median()
    return Advantages(advantages_T=inputs.layout.spread(scores_S) * inputs.layout.mask_T)


ESTIMATORS["median"] = Estimator(compute=from_median, paper="arXiv:0000.00000", policy_loss="gspo")
'''

MEMBER = '    median = "median"'

PROGRAM = """
from rlscale.config import load_config
config = load_config(["algo.advantage_estimator=median"])

import torch
from rlscale.algo.ragged import TokenLayout
from rlscale.training.loss.rollout_advantages import RolloutInputs, compute_rollout_advantages
from rlscale.training.loss.token_loss import TokenInputs, compute_token_losses

layout = TokenLayout.from_lengths(torch.tensor([True, False, True, True]), lengths_S=torch.tensor([2, 1, 1]))
inputs = RolloutInputs(
    rewards_S=torch.tensor([3.0, 1.0, 2.0]), group_ids_S=torch.zeros(3, dtype=torch.int64),
    response_lens_S=torch.tensor([2, 1, 1]), max_response_len=2, layout=layout, rollout_logprobs_T=torch.zeros(4),
)
advantages = compute_rollout_advantages(config.algo, inputs)
tokens = TokenInputs(old_logprobs=torch.zeros(4), rollout_logprobs=torch.zeros(4), advantages=advantages)
losses, _ = compute_token_losses(config.algo, logprobs=torch.zeros(4), entropy=None, inputs=tokens, layout=layout)
print(config.algo.advantage_estimator, advantages.tolist(), losses.tolist())
"""


def test_a_new_estimator_is_a_function_an_entry_and_a_member(tmp_path: Path) -> None:
    assert rlscale.__file__ is not None
    package = tmp_path / "src" / "rlscale"
    shutil.copytree(packaged_folder(), tmp_path / "conf")
    shutil.copytree(Path(rlscale.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / "algo" / "advantages.py").open("a") as module:
        module.write(MEDIAN)
    enum = package / "config" / "groups" / "algo.py"
    line = next(line for line in enum.read_text().splitlines() if line.startswith("    ppo = "))
    enum.write_text(enum.read_text().replace(line, f"{line}\n{MEMBER}"))
    env = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "median [1.0, 0.0, -1.0, 0.0] [-1.0, 0.0, 1.0, -0.0]"
