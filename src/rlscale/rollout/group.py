"""Generation of one group: the samples of one prompt."""

import hashlib
from dataclasses import replace

from rlscale.rollout.engine_pool import EnginePool
from rlscale.types import Generation, Group, Prompt, Sample, SampleStatus, SamplingParams, WeightVersion

_STATUS = {
    "stop": SampleStatus.completed,
    "length": SampleStatus.truncated,
    "abort": SampleStatus.aborted,
}


def group_seed(seed: int, purpose: str, index: int) -> int:
    """Seed of a group's first sample; the others count up from it. Depends on its arguments alone."""
    # Not hash(): Python salts the hash of a string differently in every process.
    digest = hashlib.blake2b(f"{seed}/{purpose}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**31


async def generate_group(
    pool: EnginePool,
    prompt: Prompt,
    params: SamplingParams,
    *,
    index: int,
    n: int,
    versions: tuple[WeightVersion, WeightVersion | None],
    purpose: str = "train",
) -> Group:
    """`n` samples of `prompt`, not yet rewarded.

    Args:
        params: `sampling_seed` is the run's seed; each group derives its own from it.
        index: number of the group, unique within `purpose`.
        versions: oldest and newest weights whose tokens are accepted; newest None: all from the oldest on.
    """
    seed = group_seed(params.sampling_seed or 0, purpose, index)
    answers = await pool.generate(
        prompt,
        replace(params, sampling_seed=seed),
        n=n,
        rid=f"{purpose}-{index}",
        oldest=versions[0],
        newest=versions[1],
    )
    samples = [
        _to_sample(prompt, answer, group_index=index, index=index * n + j, seed=seed + j)
        for j, answer in enumerate(answers)
    ]
    return Group(index=index, prompt=prompt, samples=samples)


def _to_sample(prompt: Prompt, answer: Generation, *, group_index: int, index: int, seed: int) -> Sample:
    sample = Sample(index=index, group_index=group_index, prompt=prompt, seed=seed)
    sample.append(
        answer.output_ids,
        logprobs=answer.logprobs,
        weight_versions=answer.weight_versions,
        routes=answer.routes,
    )
    sample.response, sample.status = answer.text, _STATUS[answer.finish_reason]
    return sample
