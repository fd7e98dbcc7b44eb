"""Rewards in slime's form, `reward(args, sample, **kwargs)`, as rewards of rlscale."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import Any

from rlscale.plugins.args_view import Args
from rlscale.plugins.sample_view import DocumentSample, to_document
from rlscale.types import Sample


class DocumentReward:
    """A reward in slime's form as a `Reward`. With `reward.group` it is called with a list of samples.

    Entries that the function adds to `sample.metadata` are added to the sample. The result is passed through: what it
    must be is checked where rewards are called.
    """

    def __init__(self, function: Callable[..., Any], args: Args) -> None:
        self.func = function  # as of a partial object, so that a caller can find out whether it is async
        self._args = args

    def __call__(self, sample: Sample | Sequence[Sample]) -> Any:
        samples = [sample] if isinstance(sample, Sample) else list(sample)
        documents = [to_document(each) for each in samples]
        found = self.func(self._args, documents[0] if isinstance(sample, Sample) else documents)
        if isawaitable(found):
            return _finish(found, documents, samples)
        _copy_metadata(documents, samples)
        return found


async def _finish(found: Awaitable[Any], documents: Sequence[DocumentSample], samples: Sequence[Sample]) -> Any:
    value = await found
    _copy_metadata(documents, samples)
    return value


def _copy_metadata(documents: Sequence[DocumentSample], samples: Sequence[Sample]) -> None:
    for document, sample in zip(documents, samples, strict=True):
        row = sample.prompt.metadata
        sample.metadata |= {k: v for k, v in document.metadata.items() if k not in row or row[k] != v}
