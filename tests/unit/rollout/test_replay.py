"""Rollouts from the files of another run."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from rlscale.control.producer import Producer
from rlscale.control.staleness import VersionGate
from rlscale.data.batch import build_batch
from rlscale.errors import DataError
from rlscale.images import Image, digest_of
from rlscale.observe.dumps import BatchDump, RolloutDump, read_dump
from rlscale.rollout.replay import ReplayedRollouts
from rlscale.types import Group, Prompt, Sample, SampleStatus


def make_group(index: int) -> Group:
    prompt = Prompt(index=index + 5, text=f"{index}+1=", token_ids=(1, 2, 3), label=str(index + 1))
    group = Group(index=index, prompt=prompt, samples=[])
    for j in range(2):
        sample = Sample(index=2 * index + j, group_index=index, prompt=prompt, seed=7 + j, metadata={"j": j})
        sample.append([4, 5 + j], logprobs=[-0.5, -0.25 * (j + 1)], weight_versions=[3, 4])
        sample.append([9], logprobs=[0.0], weight_versions=[4], trainable=False)
        sample.response, sample.status, sample.reward = "ab", SampleStatus.truncated, 0.5 * j
        group.samples.append(sample)
    return group


GROUPS = [make_group(4), make_group(5)]


def replay(template: str, rollout_id: int) -> list[Group]:
    source = ReplayedRollouts(template)
    prompts = source.next_prompts(rollout_id)
    return [asyncio.run(source.group(index, prompt, oldest=2, newest=2)) for index, prompt in prompts]


def test_samples_are_read_as_written_except_for_the_version(tmp_path: Path) -> None:
    template = str(tmp_path / "dumps" / "{rollout_id}.jsonl")
    RolloutDump(template).write(2, GROUPS, version=4)
    for read, written in zip(replay(template, 2), GROUPS, strict=True):
        assert (read.index, read.prompt) == (written.index, written.prompt)
        for ours, theirs in zip(read.samples, written.samples, strict=True):
            assert ours.weight_versions.tolist() == [2, 2, 2]
            ours.weight_versions = theirs.weight_versions
            assert ours == theirs


def test_objects_in_the_metadata_are_dumped_as_text(tmp_path: Path) -> None:
    group = make_group(4)
    group.samples[0].metadata["seen"] = {1}  # by a function of the user
    RolloutDump(str(tmp_path / "{rollout_id}.jsonl")).write(0, [group], version=0)
    assert read_dump(tmp_path / "0.jsonl")[0]["metadata"]["seen"] == "{1}"


async def test_rollouts_that_are_read_ahead_have_their_outcome(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}.jsonl")
    for rollout_id in range(4):
        RolloutDump(template).write(rollout_id, [make_group(2 * rollout_id), make_group(2 * rollout_id + 1)], version=0)
    gate = VersionGate(0)
    producer = Producer(ReplayedRollouts(template), gate, rollouts=range(4), max_staleness=2)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(producer.run())
        for rollout_id in range(4):
            rollout = await producer.next()
            await producer.wait_for_draws()
            page = producer.close_page(rollout)
            assert page.outcomes["trained"] == tuple(range(4 * rollout_id, 4 * rollout_id + 4))
            await gate.open(rollout_id + 1)
    assert page.outcomes["open"] == ()


def with_routes() -> list[Group]:
    groups = [make_group(4), make_group(5)]
    groups[1].samples[0].routes = np.arange(6 * 2, dtype=np.uint8).reshape(6, 1, 2)
    return groups


def test_routes_are_in_a_file_next_to_the_samples(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}.jsonl")
    dump, source = RolloutDump(template), ReplayedRollouts(template, has_routes=True)
    written = with_routes()
    dump.write(0, written, version=4)
    prompts = source.next_prompts(0)
    read = [asyncio.run(source.group(index, prompt, oldest=2, newest=2)) for index, prompt in prompts]
    assert [sample.routes is None for group in read for sample in group.samples] == [True, True, False, True]
    assert np.array_equal(read[1].samples[0].routes, written[1].samples[0].routes)
    dump.write(0, GROUPS, version=4)  # a run without routes overwrites the dump
    with pytest.raises(DataError, match=r"0\.jsonl must have a file of routes next to it"):
        source.next_prompts(0)


def test_routes_of_another_number_of_tokens_are_an_error(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}.jsonl")
    groups = with_routes()
    groups[1].samples[0].routes = np.zeros((5, 1, 2), dtype=np.uint8)
    RolloutDump(template).write(0, groups, version=4)
    with pytest.raises(DataError, match=r"row 3 must be a sample, got .*routes must cover 6 tokens, got 5"):
        ReplayedRollouts(template, has_routes=True).next_prompts(0)


def with_images(folder: Path) -> list[Group]:
    """Two groups: a picture of its prompt in both samples of the first, and a second one in one of them."""
    groups, found = [make_group(4), make_group(5)], []
    for name in (b"first", b"second"):
        (folder / name.decode()).write_bytes(name)
        found.append(
            Image(uri=str(folder / name.decode()), digest=digest_of(name), grid=(1, 2, 2), token=9, num_tokens=1)
        )
    groups[0].samples[0].images = (found[0],)
    groups[0].samples[1].images = (found[0], found[1])
    return groups


def test_images_are_in_one_file_next_to_the_samples_each_once(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}.jsonl")
    dump, source = RolloutDump(template), ReplayedRollouts(template, has_images=True)
    written = with_images(tmp_path)
    dump.write(0, written, version=4)
    for file in ("first", "second"):
        (tmp_path / file).unlink()  # a dump is complete without the data of its run
    prompts = source.next_prompts(0)
    read = [asyncio.run(source.group(index, prompt, oldest=2, newest=2)) for index, prompt in prompts]
    images = [[image.read() for image in sample.images] for group in read for sample in group.samples]
    assert images == [[b"first"], [b"first", b"second"], [], []]
    assert read[0].samples[1].images[1].grid == (1, 2, 2)
    assert len(json.loads((tmp_path / "0.jsonl.images.json").read_text())["images"]) == 2
    dump.write(0, GROUPS, version=4)  # a run without images overwrites the dump
    assert not (tmp_path / "0.jsonl.images.json").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"images": {}, "samples": {"0": ["of no image"]}}'])
def test_a_damaged_file_of_images_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    template = str(tmp_path / "{rollout_id}.jsonl")
    RolloutDump(template).write(0, with_images(tmp_path), version=4)
    (tmp_path / "0.jsonl.images.json").write_text(content)
    with pytest.raises(
        DataError, match=r"0\.jsonl\.images\.json must hold the images of samples, got .*; dump it again"
    ):
        ReplayedRollouts(template, has_images=True).next_prompts(0)


def broken(**changes: Any) -> str:
    record = {"group_index": 0, "tokens": [1, 2], "loss_mask": [1]} | changes
    return json.dumps(record) + "\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "must contain rollout 0 for debug.load_rollout_data, got .*; set data.num_rollout"),
        ("", "must contain at least one sample that did not fail, got none"),
        ("x\n", "row 1 must be a JSON object, got 'x'"),
        (broken(), "row 1 must be a sample, got KeyError: 'prompt_index'"),
    ],
)
def test_an_unusable_file_is_an_error(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "0.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        ReplayedRollouts(str(tmp_path / "{rollout_id}.jsonl")).next_prompts(0)


def test_the_batch_is_written_with_the_trainers_logprobs(tmp_path: Path) -> None:
    batch = build_batch(GROUPS, 4, has_rewards=True, mask_truncated=False)
    BatchDump(str(tmp_path / "a" / "{rollout_id}.safetensors")).write(
        3,
        batch,
        logprobs={1: np.array([-1.0, -2.0, -3.0], dtype=np.float32)},
        columns={"advantages": np.arange(len(batch.tokens), dtype=np.float32)},
    )
    path = tmp_path / "a" / "3.safetensors"
    columns = load_file(path)
    assert np.array_equal(columns["tokens"], batch.tokens) and np.array_equal(columns["rewards"], batch.rewards)
    assert np.array_equal(columns["offsets"], batch.offsets)
    assert columns["advantages"].tolist() == list(range(len(batch.tokens)))
    trainer = columns["trainer_logprobs"]
    assert trainer[9:12].tolist() == [-1.0, -2.0, -3.0], "the response of sample 1"
    assert np.isnan(np.delete(trainer, [9, 10, 11])).all()
    with safe_open(path, "np") as file:
        assert file.metadata() == {"rollout_id": "3", "version": "4"}


def test_an_evaluation_is_written_by_set_and_version(tmp_path: Path) -> None:
    RolloutDump(str(tmp_path / "{rollout_id}.jsonl")).write_evaluation(7, {"easy": GROUPS[:1], "hard": GROUPS})
    records = read_dump(tmp_path / "eval_7.jsonl")
    per_set = [sum(len(group.samples) + len(group.failed) for group in groups) for groups in (GROUPS[:1], GROUPS)]
    assert [record["eval_set"] for record in records] == ["easy"] * per_set[0] + ["hard"] * per_set[1]
    assert {record["version"] for record in records} == {7}
    assert records[0]["reward"] == GROUPS[0].samples[0].reward and records[0]["rollout_id"] is None
