"""Renders the page: facts, and sections whose data the scripts in `assets/` draw.

jinja2 escapes all text of a run, or the page gets it as JSON that its scripts insert as text. The content security
policy names the page's style and script by hash, so that the page runs no other script and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, FunctionLoader, StrictUndefined

from rlscale.observe.metrics.metric_names import METRICS
from rlscale.observe.metrics.outcomes import describe_outcomes
from rlscale.observe.report.evaluations import render_evaluations
from rlscale.observe.report.run_reader import RunData
from rlscale.observe.report.sections import (
    conversation_section,
    curve_section,
    distribution_section,
    end_section,
    group_section,
    lane_section,
    outcome_section,
    sample_section,
    setup_section,
    time_section,
)
from rlscale.observe.report.series import finished_rollouts, metric_columns, non_finite_warnings
from rlscale.observe.reporter import diff_limit

SECTIONS = (
    end_section.SECTION,
    curve_section.SECTION,
    time_section.SECTION,
    outcome_section.SECTION,
    lane_section.SECTION,
    group_section.SECTION,
    distribution_section.SECTION,
    conversation_section.SECTION,
    sample_section.SECTION,
    setup_section.SECTION,
)
"""Sections in the order of the page."""

STYLES = (
    "uplot/uPlot.min.css",
    "style.css",
    *(name for section in SECTIONS for name in section.styles),
    "evaluations.css",
)
SCRIPTS = (
    "uplot/uPlot.iife.min.js",
    "page.js",
    *(name for section in SECTIONS for name in section.scripts),
    "start.js",
)


def render(run: RunData) -> str:
    """Renders the page as one HTML text."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_asset),
    )
    environment.filters["quoted"] = shlex.quote
    # Phases and charts have an order; by default jinja2 sorts keys.
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    style, script = ("\n".join(_asset(name) for name in names) for names in (STYLES, SCRIPTS))
    return environment.get_template("page.html.jinja").render(
        title=run.folder.resolve().name,
        is_finished=run.result is not None,
        facts=list(_facts(run)),
        warnings=[*(run.result or {}).get("warnings", []), *non_finite_warnings(run.metrics)],
        sections=SECTIONS,
        launches=run.launches,
        config_yaml=run.config_yaml,
        data=_page_data(run),
        evaluations=render_evaluations(run.folder),
        style=style,
        script=script,
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; "
        "form-action 'none'",
    )


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Hash source of a content security policy for a script or a style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _page_data(run: RunData) -> dict[str, Any]:
    config = _config(run)
    return {
        "metrics": metric_columns(run.metrics),
        "meanings": METRICS,
        **{section.name: section.data(run) for section in SECTIONS},
        "diff_limit": diff_limit(
            _get(config, "debug.logprob_diff_warn"), str(_get(config, "train.dtype") or "bfloat16")
        ),
        "has_diff_limit": _get(config, "debug.logprob_diff_warn") is not None or not _samples_otherwise(config),
    }


def _samples_otherwise(config: Mapping[str, Any]) -> bool:
    """`rlscale.config.samples_otherwise` for a configuration read from YAML."""
    in_flight = bool(_get(config, "rollout.max_staleness")) and _get(config, "rollout.update_mode") == "in_flight"
    mixes_caches = in_flight and _get(config, "rollout.pause_mode") == "in_place"
    return mixes_caches or _get(config, "rollout.weight_precision") is not None


def _facts(run: RunData) -> Iterator[tuple[str, str]]:
    """Pairs of label and text for the header."""
    config, result = _config(run), run.result or {}
    rewards = [record["reward/mean"] for record in run.metrics if "reward/mean" in record]
    held_out = [record["eval/reward_mean"] for record in run.metrics if "eval/reward_mean" in record]
    if held_out:
        first, last = result.get("initial_eval"), result.get("final_eval")
        yield "held-out reward", f"{_number(first, held_out[0])} → {_number(last, held_out[-1])}"
    if rewards:
        yield "training reward", f"{_number(None, rewards[0])} → {_number(None, rewards[-1])}"
    yield "rollouts", _rollouts(run, config)
    if "num_tokens" in result:
        last = " (last start)" if len(run.launches) > 1 else ""
        yield "tokens", f"{result['num_tokens']:,} in {result['seconds']:,.0f} s{last}"
    per_rollout = (_get(config, "batch.rollout_batch_size") or 0) * (_get(config, "batch.n_samples_per_prompt") or 0)
    outcomes = describe_outcomes(run.metrics, per_rollout=per_rollout)
    if outcomes is not None:
        yield "trajectories", outcomes
    for label, path in _SETTINGS:
        value = _get(config, path)
        if value is not None:
            yield label, str(value)
    yield from _origin(run.launches)


_SETTINGS = (
    ("experiment", "run.experiment"),
    ("algorithm", "algo.advantage_estimator"),
    ("loss", "algo.loss_type"),
    ("model", "model.hf_checkpoint"),
    ("model", "model.build"),
    ("trainer", "train.backend"),
    ("engine", "rollout.engine"),
    ("number format", "train.dtype"),
)


def _origin(launches: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    if not launches:
        return
    last = launches[-1]
    yield "started", ", ".join(f"{launch['time'][:16].replace('T', ' ')} UTC" for launch in launches[-3:])
    git = last.get("git", {}).get("rlscale")
    version = last.get("versions", {}).get("rlscale")
    state = f", {git['commit'][:10]}{' with changes' if git['dirty'] else ''}" if git and git.get("commit") else ""
    yield "rlscale", f"{version}{state}"


def _rollouts(run: RunData, config: Mapping[str, Any]) -> str:
    done = 1 + max(finished_rollouts(run.metrics), default=-1)
    total = _get(config, "data.num_rollout")
    return f"{done:,} of {total:,}" if total is not None else f"{done:,}"


def _number(value: Any, otherwise: Any) -> str:
    return f"{float(otherwise if value is None else value):.3f}"


def _config(run: RunData) -> Mapping[str, Any]:
    return yaml.safe_load(run.config_yaml) or {}


def _get(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
