"""Section of the page about evaluations: a table of all of them, and samples of the newest one.

It needs no script: prompts and samples unfold by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from rlscale.errors import DataError
from rlscale.observe.evaluation_files import REGRADE, find_evaluations, read_about
from rlscale.observe.evaluation_table import COLUMNS, set_rows

TEMPLATE = "evaluations.html.jinja"
MAX_PROMPTS, MAX_SAMPLES, MAX_CHARS = 20, 8, 4000
"""Limits of what the page shows of a set, of a prompt and of a text; the files have everything."""


def render_evaluations(run: Path) -> str:
    """The section as HTML; empty for a run without kept evaluations.

    Args:
        run: run folder.

    Raises:
        DataError: a file of an evaluation cannot be read.
    """
    found = find_evaluations(run)
    if not found:
        return ""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = (files(__package__) / "assets" / TEMPLATE).read_text(encoding="utf-8")
    newest = next(path for path in reversed(found) if not path.name.endswith(REGRADE))
    shown = read_about(newest)
    # The template escapes every text of the run.
    return environment.from_string(template).render(
        columns=COLUMNS,
        rows=[row for path in found for row in _rows(path)],
        version=shown["version"],
        sets=[_samples(newest, name, about, shown["metrics"]) for name, about in shown["sets"].items()],
    )


def _rows(folder: Path) -> Iterator[Mapping[str, Any]]:
    about = read_about(folder)
    for cells, (name, settings) in zip(set_rows(about["metrics"], about["sets"]), about["sets"].items(), strict=True):
        yield {
            "version": _versions(name, about),
            "num_rollouts": about["num_rollouts"],
            "weights": about.get("weights") or "the run",
            "is_regrade": folder.name.endswith(REGRADE),
            "cells": cells,
            "reward": settings.get("reward") or "-",
        }


def _versions(name: str, about: Mapping[str, Any]) -> str:
    """The version of the weights that generated a set, or the oldest and the newest one."""
    low, high = (about["metrics"].get(f"eval/{name}/version_{end}", about["version"]) for end in ("min", "max"))
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def _samples(folder: Path, name: str, about: Mapping[str, Any], metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a set and some of its prompts, evenly spread over the file."""
    total = int(metrics.get(f"eval/{name}/num_prompts", 0))
    number = min(total, MAX_PROMPTS)
    chosen = {i * total // number for i in range(number)}
    prompts = sorted(_read_lines(folder / about["file"], chosen), key=lambda prompt: int(prompt["row"]))
    settings = {key: value for key, value in about.items() if key != "file" and value is not None}
    return {"name": name, "settings": settings, "prompts": prompts, "num_prompts": total}


def _read_lines(path: Path, chosen: set[int]) -> Iterator[Mapping[str, Any]]:
    """Only the chosen lines are parsed: the file of a large set has gigabytes."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                if number in chosen:
                    yield _shown(json.loads(line))
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} must hold the samples of an evaluation, got {cause}; evaluate again") from error


def _shown(record: Mapping[str, Any]) -> Mapping[str, Any]:
    samples = sorted((*record["samples"], *record["failed"]), key=lambda sample: (sample["index"], sample["path"]))
    rewards = [sample["reward"] for sample in samples if sample["reward"] is not None]
    label = record["label"]
    return {
        "row": record["row"],
        "prompt": _cut(record["prompt"]),
        "label": None if label is None else _cut(label if isinstance(label, str) else json.dumps(label)),
        "rewards": ", ".join(f"{reward:g}" for reward in rewards[:MAX_SAMPLES]) or "failed",
        "num_hidden": max(0, len(samples) - MAX_SAMPLES),
        "samples": [
            {
                "reward": "-" if sample["reward"] is None else f"{sample['reward']:g}",
                "status": sample["status"],
                "versions": _sample_versions(sample),
                "length": len(sample["response_ids"]),
                "text": _cut(sample["response"]),
                "failure": (sample.get("failure") or {}).get("message"),
            }
            for sample in samples[:MAX_SAMPLES]
        ],
    }


def _sample_versions(sample: Mapping[str, Any]) -> str:
    """The versions of a sample that more than one version generated; empty for any other one."""
    found = list(dict.fromkeys(version for version, _ in sample.get("weight_versions", ())))
    return "" if len(found) < 2 else f"versions {', '.join(map(str, found))}"


def _cut(text: str) -> str:
    hidden = len(text) - MAX_CHARS
    return text if hidden <= 0 else f"{text[:MAX_CHARS]} ... ({hidden:,} more characters)"
