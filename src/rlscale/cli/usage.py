"""The text of `rlscale-train --help`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rlscale.config.keys import keys

_TEXT = """\
Trains a language model with reinforcement learning.

usage: rlscale-train [flags] [group=option ...] [group.key=value ...]

examples:
  rlscale-train                                            a small model learns to add, on a CPU
  rlscale-train experiment=qwen3_4b_grpo                   Qwen3-4B on one node of 8 GPUs
  rlscale-train experiment=qwen3_4b_grpo on=cpu            the same experiment here, small
  rlscale-train algo=gspo optim.lr=1e-4                    change an option and a value
  rlscale-train -m algo.eps_clip=0.1,0.2 optim.lr=1e-5,3e-5   four jobs, a table and a picture

flags:
  -h, --help          this text
  --version           the version
  --cfg job           print the complete config and start nothing
  -m, --multirun      one job for each combination of values given as a,b,c; side by side with
                      hydra/launcher=joblib; values chosen by optuna with hydra/sweeper=optuna
  --config-dir DIR    also take experiments and options from DIR, laid out like conf/
  -sc install=SHELL   completion for bash, zsh or fish: eval "$(rlscale-train -sc install=bash)"

groups and their options:
{groups}

groups and how many keys they have (rlscale-config help <group> documents them,
rlscale-config explain <key> tells one's value and who set it):
{keys}
"""


def usage(groups: Mapping[str, Sequence[str]]) -> str:
    """The help, with the options and keys there are."""
    options = "\n".join(
        textwrap.fill(", ".join(names), width=100, initial_indent=f"  {group:<12}", subsequent_indent=" " * 14)
        for group, names in groups.items()
    )
    by_group: dict[str, int] = {}
    for key in keys().values():
        if key.group:
            by_group[key.group] = by_group.get(key.group, 0) + 1
    counted = ", ".join(f"{group} {number}" for group, number in by_group.items())
    return _TEXT.format(groups=options, keys=_wrap(counted))


def _wrap(text: str, *, width: int = 96) -> str:
    lines = [""]
    for part in text.split(", "):
        if len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += f"{part}, "
    return "\n".join(f"  {line.rstrip()}" for line in lines).rstrip(",")
