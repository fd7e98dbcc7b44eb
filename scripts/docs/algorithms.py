"""Writes the reference page of the algorithms from the functions of `algo`: formula, paper and keys."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from rlscale.algo import corrections, kl, losses, off_policy, reduce, whitening
from rlscale.algo.advantages import (
    ESTIMATORS,
    batch_std,
    distill,
    gae,
    leave_one_out,
    length_adaptive_lambda,
    normalize_by_group,
    overlong_penalty,
)
from rlscale.algo.distillation import teacher_kl
from rlscale.algo.linear_distillation import logprobs_and_teacher_kl
from rlscale.config.hydra.config_folders import packaged_folder
from rlscale.config.keys import keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading of the page, its functions, and their config keys."""

    title: str
    functions: tuple[Callable[..., Any], ...]
    keys: tuple[str, ...]  # without the group


SECTIONS: tuple[Section, ...] = (
    Section(
        title="Rewards to advantages",
        functions=(
            *dict.fromkeys(estimator.compute for estimator in ESTIMATORS.values()),
            normalize_by_group,
            batch_std,
            leave_one_out,
            gae,
            length_adaptive_lambda,
            overlong_penalty,
            whitening.whiten,
            distill,
            teacher_kl,
            logprobs_and_teacher_kl,
        ),
        keys=(
            "rewards_normalization",
            "grpo_std_normalization",
            "scale_rewards",
            "baseline",
            "gamma",
            "lambd",
            "lambd_critic",
            "lambd_alpha",
            "kl_coef",
            "overlong_buffer_len",
            "overlong_penalty",
            "overlong_filter",
            "normalize_advantages",
            "opd_kl_coef",
            "opd_kl",
            "opd_top_k",
            "opd_direction",
            "custom_advantage_function_path",
            "compute_advantages_and_returns",
        ),
    ),
    Section(
        title="Losses",
        functions=(*losses.POLICY_LOSSES.values(), losses.value_loss, losses.sft_loss),
        keys=(
            "loss_type",
            "policy_loss",
            "eps_clip",
            "eps_clip_high",
            "eps_clip_c",
            "sapo_temperature_pos",
            "sapo_temperature_neg",
            "entropy_coef",
            "custom_loss_function_path",
        ),
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
        functions=(reduce.mean_per_trajectory, reduce.mean_per_token, reduce.mean_per_length, reduce.weighted_sum),
        keys=(
            "dynamic_sampling",
            "ppo_epochs",
            "calculate_per_token_loss",
            "divide_by_max_response_len",
            "custom_reducer_function_path",
        ),
    ),
    Section(title="Measured only", functions=(corrections.logprob_difference,), keys=("use_rollout_entropy",)),
)

GOLDEN: Mapping[str, str] = {
    "group_relative": "tests/golden/test_advantages.py",
    **dict.fromkeys(
        (
            "gpg",
            "gdpo",
            "batch_std",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "ppo",
            "distill",
            "overlong_penalty",
        ),
        "tests/golden/test_estimators.py",
    ),
    **{loss.__name__: "tests/golden/test_losses.py" for loss in (*losses.POLICY_LOSSES.values(), losses.sft_loss)},
    "kl_estimate": "tests/golden/test_kl.py",
    "truncated_importance_weights": "tests/golden/test_reductions.py",
    "decoupled_weights": "tests/golden/test_decoupled.py",
    **dict.fromkeys(("importance_weights", "off_policy_mask"), "tests/golden/test_off_policy.py"),
}
"""Golden test of each function: numbers by hand, from a paper, or from a reference loop."""

TITLES: Mapping[str, str] = {
    "grpo": "GRPO",
    "grpo_per_token": "GRPO by token",
    "dr_grpo": "Dr.GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "sapo": "SAPO",
    "gpg": "GPG",
    "reinforce": "REINFORCE",
    "gdpo": "GDPO",
    "rloo": "RLOO",
    "reinforce_plus_plus": "REINFORCE++",
    "reinforce_plus_plus_baseline": "REINFORCE++ with a baseline",
    "ppo": "PPO",
    "vapo": "VAPO",
    "sft": "Supervised training",
    "sft_per_token": "Supervised training by token",
}
"""Options of `conf/algo` by name, in the order of the table."""

SAME_CURVE: Mapping[str, str] = {"grpo_per_token": "grpo", "sft_per_token": "sft"}
"""Options without a separate picture, and the option whose picture they use."""

PICTURES = "images/algorithms"
"""Folder of the curves by `benchmarks/algorithms.py`, below `docs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Addition:
    """An addition to an algorithm: a row of the second table."""

    title: str
    paper: str
    key: str
    picture: str
    function: Callable[..., Any]


ADDITIONS: tuple[Addition, ...] = (
    Addition(
        title="Scaled by the whole batch",
        paper="arXiv:2508.08221",
        key="scale_rewards=batch",
        picture="batch_scale",
        function=batch_std,
    ),
    Addition(
        title="KL loss, KL penalty",
        paper="Schulman 2020",
        key="use_kl_loss`, `algo.kl_coef",
        picture="kl_loss",
        function=kl.kl_estimate,
    ),
    Addition(
        title="Dual clip",
        paper="arXiv:1912.09729",
        key="eps_clip_c",
        picture="dual_clip",
        function=losses.clipped_policy_loss,
    ),
    Addition(
        title="On-policy distillation",
        paper="arXiv:2306.13649",
        key="opd_kl_coef",
        picture="distillation",
        function=distill,
    ),
    Addition(
        title="Soft punishment of long answers",
        paper="arXiv:2503.14476",
        key="overlong_buffer_len",
        picture="dapo",
        function=overlong_penalty,
    ),
    Addition(
        title="TIS",
        paper="Yao et al. 2025",
        key="use_tis",
        picture="tis",
        function=corrections.truncated_importance_weights,
    ),
    Addition(
        title="IcePop",
        paper="arXiv:2510.18855",
        key="tis_type=icepop",
        picture="icepop",
        function=off_policy.importance_weights,
    ),
    Addition(
        title="Masked importance sampling",
        paper="Liu, Li et al. 2025",
        key="tis_type=mis",
        picture="mis",
        function=off_policy.importance_weights,
    ),
    Addition(
        title="Decoupled PPO",
        paper="arXiv:2505.24298",
        key="decoupled_loss",
        picture="decoupled",
        function=corrections.decoupled_weights,
    ),
    Addition(
        title="Off-policy sequence masking",
        paper="DeepSeek-V3.2",
        key="opsm_delta",
        picture="opsm",
        function=off_policy.off_policy_mask,
    ),
)

_INTRODUCTION = """# Algorithms

Formulas behind the keys of [`algo`](algo.md), from the docstrings of `rlscale.algo`. `logprob` is that of the policy,
with gradient, `old` that of the policy that is improved, `rollout` the one that the engine reported, `ref` that of the
reference model, `A` the advantage. All in float32; logits are divided by `rollout.temperature` first. Sums are over
trainable tokens, and denominators belong to the whole optimiser step: micro-batches, ranks, packing and
[shared prefixes](../how-to/shared-prefixes.md) do not change a loss.

A new estimator is a function and an entry of `ESTIMATORS` in `src/rlscale/algo/advantages.py`, and a member of the enum
`AdvantageEstimator` in `src/rlscale/config/groups/algo.py`. To add one without changing rlscale see
[Your own loss](../how-to/your-own-loss.md).
"""

_CURVES = """The golden tests are in `tests/golden/`. Each curve is a short run on the arithmetic task from the
quickstart's warm-up: the mean reward of its rollouts, or the loss of supervised training. One seed: enough to show that
it learns, not to rank algorithms; settings and numbers are in `benchmarks/results/algorithms.md`.
"""


def make_page() -> str:
    """The text of the page, without the generated-file notice."""
    parts = [_INTRODUCTION, "## Table", "", *_table(), "", _CURVES, "## Additions", "", *_additions(), ""]
    parts += ["## Values of the options", "", *_options(), "", "## Estimators", "", *_estimators(), ""]
    for section in SECTIONS:
        parts += [f"## {section.title}", ""]
        for function in section.functions:
            parts += [f"### `{function.__name__}`", "", _explanation(function), ""]
        parts += [_key_line(section.keys), ""]
    return "\n".join(parts).rstrip() + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A file of `conf/algo`."""

    name: str
    remarks: str
    values: Mapping[str, Any]

    @property
    def paper(self) -> str:
        found = re.search(r"arXiv (\d+\.\d+)", self.remarks)
        return f"arXiv:{found[1]}" if found else ""

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """Its functions: advantages and loss, or the loss alone."""
        name = self.values.get("advantage_estimator")
        if name is None:
            return (losses.sft_loss,)
        estimator = ESTIMATORS[name]
        return estimator.compute, losses.POLICY_LOSSES[self.values.get("policy_loss") or estimator.policy_loss]


def read_options() -> dict[str, Option]:
    """The options of `conf/algo` by name, in the order of the table."""
    options = {}
    for file in sorted((packaged_folder() / "algo").glob("*.yaml"), key=lambda file: list(TITLES).index(file.stem)):
        text = file.read_text(encoding="utf-8")
        remarks = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
        options[file.stem] = Option(name=file.stem, remarks=" ".join(remarks), values=yaml.safe_load(text))
    return options


def _table() -> list[str]:
    """Name, paper, key, golden test and curve of each option, and of a loss of the user's."""
    lines = ["| algorithm, paper and key | learns | golden tests |", "|---|---|---|"]
    for name, option in read_options().items():
        tests = "<br>".join(dict.fromkeys(_test_of(each) for each in option.functions))
        about = "<br>".join(part for part in (f"**{TITLES[name]}**", option.paper, f"`algo={name}`") if part)
        lines.append(f"| {about} | {_curve(name)} | {tests} |")
    own, test = "algo.custom_loss_function_path", "tests/contract/test_algo_hooks.py"
    about = f"**[Your own loss](../how-to/your-own-loss.md)**<br>`{own}`"
    lines.append(f"| {about} | {_curve('custom_loss')} | `{test}` |")
    return lines


def _test_of(function: Callable[..., Any]) -> str:
    # Without the folder, which would make the tables wider than the page.
    return f"`{GOLDEN[function.__name__].removeprefix('tests/golden/')}`"


def _curve(name: str) -> str:
    return f"![curve of {name}](../{PICTURES}/{SAME_CURVE.get(name, name)}.svg)"


def _additions() -> list[str]:
    lines = ["| addition, paper and key | learns | function and golden tests |", "|---|---|---|"]
    for each in ADDITIONS:
        about = f"**{each.title}**<br>{each.paper}<br>`algo.{each.key}`"
        lines.append(f"| {about} | {_curve(each.picture)} | `{each.function.__name__}`<br>{_test_of(each.function)} |")
    return lines


def _options() -> list[str]:
    lines = ["| option | description | values |", "|---|---|---|"]
    for name, option in read_options().items():
        sets = ", ".join(f"`{key}: {_plain(value)}`" for key, value in option.values.items() if key != "loss_type")
        lines.append(f"| `algo={name}` | {option.remarks} | {sets or '`loss_type`'} |")
    return lines


def _estimators() -> list[str]:
    lines = ["| `algo.advantage_estimator` | paper | advantages | loss by default |", "|---|---|---|---|"]
    for name, estimator in ESTIMATORS.items():
        loss = losses.POLICY_LOSSES[estimator.policy_loss].__name__
        lines.append(f"| `{name}` | {estimator.paper} | `{estimator.compute.__name__}` | `{loss}` |")
    return lines


def _explanation(function: Callable[..., Any]) -> str:
    """The docstring up to its list of arguments."""
    text = inspect.getdoc(function) or ""
    kept = re.split(r"\n\n(?=Args:|Returns:|Raises:)", text)[0]
    return re.sub(r"([*_<])", r"\\\1", kept) if "`" not in kept else kept


def _key_line(names: tuple[str, ...]) -> str:
    assert all(f"algo.{name}" in keys() for name in names), "a key of the page was renamed"
    return "Keys: " + ", ".join(f"`algo.{name}`" for name in names) + "."


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
