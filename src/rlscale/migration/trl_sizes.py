"""Numbers of a run of TRL: its arguments, processes, and the sizes that follow from them."""

from __future__ import annotations

import math

from rlscale.migration.translation_draft import TranslationDraft

PROCESSES = "NUM_PROCESSES"
"""Variable of the number of GPUs that accelerate starts: GRPOConfig does not have it."""


def given_number(draft: TranslationDraft, name: str, default: float) -> float:
    """The number of an argument; the default where it is not given, or no finite number."""
    argument = draft.given(name)
    number = finite_number(default if argument is None else argument.value)
    return float(default) if number is None else number


def finite_number(value: float | str) -> float | None:
    """A finite number; None for every other text."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def num_gpus(draft: TranslationDraft) -> tuple[int, int]:
    """Nodes, and processes of a node: as given, as the command starts them, or as an argument of `trl`."""
    given = dict(draft.reading.given).get(PROCESSES, "")
    if given.isdecimal():
        return 1, max(1, int(given))
    return draft.reading.gpus or (1, max(1, int(given_number(draft, "num_processes", 1))))


def num_processes(draft: TranslationDraft) -> int:
    """Processes of all nodes."""
    nodes, each = num_gpus(draft)
    return nodes * each


def step_samples(draft: TranslationDraft) -> int:
    """Samples of an optimiser step over all processes."""
    per_device = given_number(draft, "per_device_train_batch_size", 8)
    return int(per_device * given_number(draft, "gradient_accumulation_steps", 1) * num_processes(draft))


def rollout_samples(draft: TranslationDraft) -> int:
    """Samples of a generation batch."""
    whole = given_number(draft, "generation_batch_size", 0)
    if whole:
        return int(whole)
    steps = given_number(draft, "steps_per_generation", given_number(draft, "gradient_accumulation_steps", 1))
    return int(given_number(draft, "per_device_train_batch_size", 8) * steps * num_processes(draft))


def num_rollouts(draft: TranslationDraft, steps: float) -> int:
    """Rollouts of a number of optimiser steps."""
    # Optimiser steps of one rollout: TRL reuses a generation batch for several, and num_iterations times.
    per_rollout = rollout_samples(draft) / max(1, step_samples(draft)) * given_number(draft, "num_iterations", 1)
    return max(1, round(steps / max(per_rollout, 1e-9)))
