"""Factories of samples and groups."""

from collections.abc import Callable

import pytest

from rlscale.types import Group, Prompt, Sample

MakeSample = Callable[..., Sample]


@pytest.fixture
def make_sample() -> MakeSample:
    def make(response: str = "", *, label: str | None = None, index: int = 0, seed: int = 0) -> Sample:
        prompt = Prompt(index=index, text="1+1=", token_ids=(1, 2), label=label)
        return Sample(index=index, group_index=0, prompt=prompt, seed=seed, response=response)

    return make


@pytest.fixture
def make_group(make_sample: MakeSample) -> Callable[..., Group]:
    def make(*responses: str, label: str = "2") -> Group:
        samples = [make_sample(response, label=label, index=i) for i, response in enumerate(responses)]
        return Group(index=0, prompt=samples[0].prompt, samples=samples)

    return make
