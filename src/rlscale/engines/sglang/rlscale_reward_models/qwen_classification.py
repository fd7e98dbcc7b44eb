"""Qwen classifiers that give the numbers of transformers.

SGLang's classes end with a linear layer that has a bias, and those of transformers, which make the checkpoints, have
none. What no checkpoint contains stays as it was initialised: a random constant of each engine, which differs between
two engines of a run and after a restart.
"""

from typing import Any

# Only installed in the interpreter that has SGLang.
from sglang.srt.models import qwen2_classification, qwen3_classification
from torch import nn


class Qwen2ForSequenceClassification(qwen2_classification.Qwen2ForSequenceClassification):  # type: ignore[misc]
    """SGLang's class with a bias of 0; one of the checkpoint replaces it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        nn.init.zeros_(self.score.bias)


class Qwen3ForSequenceClassification(qwen3_classification.Qwen3ForSequenceClassification):  # type: ignore[misc]
    """SGLang's class with a bias of 0; one of the checkpoint replaces it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        nn.init.zeros_(self.score.bias)


EntryClass = [Qwen2ForSequenceClassification, Qwen3ForSequenceClassification]
"""The classes that SGLang registers."""
