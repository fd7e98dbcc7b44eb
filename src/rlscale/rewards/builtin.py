"""Built-in rewards that read the text only."""

import random

from rlscale.types import Sample


def exact_match(sample: Sample) -> float:
    """1 if the response equals the label, ignoring surrounding whitespace, else 0."""
    return float(sample.answer.strip() == required_label(sample).strip())


def random_reward(sample: Sample) -> float:
    """0 or 1 with equal probability, fixed by the sample's seed: for tests and timing without a grader."""
    return float(random.Random(sample.seed).getrandbits(1))


def zero_reward(sample: Sample) -> float:
    """0 for every sample: the signal of a run comes from elsewhere, e.g. from the teacher of distillation."""
    return 0.0


def missing_reward(sample: Sample) -> float:
    """Raises ValueError: the generate function has not graded a sample, and the run has no reward for it."""
    raise ValueError("sample.reward must be set by the generate function, got None; set it, or set reward.type")


def required_label(sample: Sample) -> str:
    """Returns the label of the prompt as text; a label that is no string as JSON.

    Raises:
        ValueError: the prompt has no label.
    """
    label = sample.prompt.label_text
    if label is None:
        raise ValueError("the prompt must have a label; set data.label_key")
    return label
