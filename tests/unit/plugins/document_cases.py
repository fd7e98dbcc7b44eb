"""Samples and groups for tests of `plugins`."""

from rlscale.types import Group, Prompt, Sample, SampleStatus


def make_group(*rewards: float, index: int = 0, label: str = "2") -> Group:
    """A group with one sample of two tokens for each reward."""
    metadata = {"level": 3, "tags": ["a"]}
    prompt = Prompt(index=index, text="1+1=", token_ids=(4, 11, 4, 12), label=label, metadata=metadata)
    samples = []
    for j, reward in enumerate(rewards):
        sample = Sample(index=index * len(rewards) + j, group_index=index, prompt=prompt, seed=j)
        sample.append([5, 2], logprobs=[-0.5, -0.25], weight_versions=[7, 8])
        sample.response, sample.status, sample.reward = "2", SampleStatus.completed, reward
        samples.append(sample)
    return Group(index=index, prompt=prompt, samples=samples)
