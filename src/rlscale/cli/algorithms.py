"""Writes the reference page of the algorithms from the functions of `algo`: formula, paper and keys."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from rlscale.algo import corrections, kl, losses, off_policy, overlong, reduce, whitening
from rlscale.algo.advantages import ESTIMATORS, distill, gae, leave_one_out, normalize_by_group
from rlscale.config.folder import packaged_folder
from rlscale.config.schema import keys
from rlscale.config.unbuilt import unbuilt


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading of the page: what it shows, and the keys that choose it."""

    title: str
    functions: tuple[Callable[..., Any], ...]
    keys: tuple[str, ...]  # without the group


SECTIONS: tuple[Section, ...] = (
    Section(
        title="Rewards to advantages",
        functions=(
            *dict.fromkeys(estimator.compute for estimator in ESTIMATORS.values()),
            normalize_by_group,
            leave_one_out,
            gae,
            overlong.overlong_penalty,
            whitening.whiten,
            distill,
        ),
        keys=(
            "rewards_normalization",
            "grpo_std_normalization",
            "baseline",
            "gamma",
            "lambd",
            "kl_coef",
            "overlong_buffer_len",
            "overlong_penalty",
            "overlong_filter",
            "normalize_advantages",
            "opd_kl_coef",
            "custom_advantage_function_path",
            "compute_advantages_and_returns",
        ),
    ),
    Section(
        title="Losses",
        functions=(*losses.POLICY_LOSSES.values(), losses.value_loss, losses.sft_loss),
        keys=("loss_type", "eps_clip", "eps_clip_high", "eps_clip_c", "entropy_coef", "custom_loss_function_path"),
    ),
    Section(
        title="KL divergence from a reference",
        functions=(kl.kl_estimate,),
        keys=("use_kl_loss", "kl_loss_coef", "kl_loss_type", "use_unbiased_kl", "kl_coef", "ref_update_interval"),
    ),
    Section(
        title="Tokens of another policy",
        functions=(
            corrections.truncated_importance_weights,
            off_policy.importance_weights,
            corrections.decoupled_weights,
            off_policy.off_policy_mask,
        ),
        keys=(
            "use_tis",
            "tis_type",
            "tis_clip",
            "tis_clip_low",
            *(path.removeprefix("algo.") for path in keys() if path.startswith("algo.mis.")),
            "custom_tis_function_path",
            "use_rollout_logprobs",
            "decoupled_loss",
            "decoupled_weight_max",
            "opsm_delta",
        ),
    ),
    Section(
        title="From tokens to the loss of a step",
        functions=(reduce.mean_per_execution, reduce.mean_per_token, reduce.mean_per_length),
        keys=("calculate_per_token_loss", "divide_by_max_response_len"),
    ),
    Section(title="Measured only", functions=(corrections.logprob_difference,), keys=("use_rollout_entropy",)),
)

GOLDEN: Mapping[str, str] = {
    "group_relative": "tests/golden/test_advantages.py",
    **dict.fromkeys(
        ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"), "tests/golden/test_estimators.py"
    ),
    **{loss.__name__: "tests/golden/test_losses.py" for loss in losses.POLICY_LOSSES.values()},
}
"""Where the numbers of a function stand beside those of a person, a paper or a slow loop."""

_INTRODUCTION = """# Algorithms

What the keys of [`algo`](algo.md) compute, from the docstrings of `rlscale.algo`. `lp` is the logprob of the policy
with its gradient, `old` that of the policy that is improved, `gen` the one that the engine reported, `ref` that of the
reference model, `A` the advantage. All in float32; logits are divided by `rollout.temperature` first. Sums are over
trainable tokens, and denominators belong to the whole optimiser step: neither micro-batches nor ranks nor packing
change a loss.

A new estimator is one module in `src/rlscale/algo/advantages/` and one line in its table `ESTIMATORS`. For your own
without touching rlscale see [Your own loss](../how-to/your-own-loss.md).
"""


def make_page() -> str:
    """The text of the page, without the line that says it is generated."""
    parts = [_INTRODUCTION, "## Options", "", *_options(), "", "## Estimators", "", *_estimators(), ""]
    for section in SECTIONS:
        parts += [f"## {section.title}", ""]
        for function in section.functions:
            parts += [f"### `{function.__name__}`", "", _explanation(function), ""]
        parts += [_key_line(section.keys), ""]
    return "\n".join(parts).rstrip() + "\n"


def _options() -> list[str]:
    """A table of `conf/algo/*.yaml`."""
    lines = ["| option | what | sets |", "|---|---|---|"]
    for file in sorted((packaged_folder() / "algo").glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        remarks = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
        values: Mapping[str, Any] = yaml.safe_load(text)
        sets = ", ".join(f"`{key}: {_plain(value)}`" for key, value in values.items() if key != "loss_type")
        lines.append(f"| `algo={file.stem}` | {' '.join(remarks)} | {sets or '`loss_type`'} |")
    return lines


def _estimators() -> list[str]:
    built = unbuilt()["algo.advantage_estimator"].values
    lines = ["| `algo.advantage_estimator` | paper | advantages | loss | numbers checked in |", "|---|---|---|---|---|"]
    for name, estimator in ESTIMATORS.items():
        title = f"`{name}`" if name in built else f"`{name}` (formulas only: there is no critic yet)"
        loss = losses.POLICY_LOSSES[estimator.policy_loss].__name__
        tests = ", ".join(f"`{file}`" for file in (GOLDEN[estimator.compute.__name__], GOLDEN[loss]))
        lines.append(f"| {title} | {estimator.paper} | `{estimator.compute.__name__}` | `{loss}` | {tests} |")
    return lines


def _explanation(function: Callable[..., Any]) -> str:
    """The docstring up to its list of arguments."""
    text = inspect.getdoc(function) or ""
    kept = re.split(r"\n\n(?=Args:|Returns:|Raises:)", text)[0]
    return re.sub(r"([*_<])", r"\\\1", kept) if "`" not in kept else kept


def _key_line(names: tuple[str, ...]) -> str:
    assert all(f"algo.{name}" in keys() for name in names), "a key of the page has another name now"
    return "Keys: " + ", ".join(f"`algo.{name}`" for name in names) + "."


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
