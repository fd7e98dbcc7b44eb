"""Rewards that need nothing but the text."""

import random

from rlscale.types import Sample


def exact_match(sample: Sample) -> float:
    """1 if the response is the label, blanks around both aside, else 0."""
    return float(sample.response.strip() == label_of(sample).strip())


def random_reward(sample: Sample) -> float:
    """0 or 1 with equal chance, fixed by the sample's seed: for tests and for timing without a grader."""
    return float(random.Random(sample.seed).getrandbits(1))


def label_of(sample: Sample) -> str:
    """The label, which every reward that compares needs.

    Raises:
        ValueError: the prompt has none.
    """
    if sample.prompt.label is None:
        raise ValueError("the prompt must have a label; set data.label_key")
    return sample.prompt.label
