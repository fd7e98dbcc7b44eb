"""Log of rollouts: selection of samples, file contents, resume."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlscale.errors import DataError
from rlscale.images import Image, digest_of, to_data_url
from rlscale.observe.console import open_console
from rlscale.observe.reporter import Observer, RolloutFiles
from rlscale.observe.rollout_log import (
    DISTRIBUTIONS_FILE,
    MAX_VALUES,
    SAMPLES_FILE,
    STEP_FILES,
    TRAJECTORIES_FILE,
    RolloutLog,
    TokenTexts,
    distribution,
)
from rlscale.observe.step_lines import cut_lines
from rlscale.types import Group, Prompt, Sample, SampleStatus, SampleTurn

PIECES = ["<end>", "a", "b", " c", "é"[:1]]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in token_ids)


def group(index: int, size: int = 2, *, reward: float | None = 1.0) -> Group:
    prompt = Prompt(index=index, text="ab", token_ids=(1, 2), label="a c")
    samples = []
    for j in range(size):
        sample = Sample(index=index * size + j, group_index=index, prompt=prompt, seed=0)
        sample.append([1, 3], logprobs=[-0.12345678, -1.0], weight_versions=[4, 4])
        sample.append([2], logprobs=[0.0], weight_versions=[5], trainable=False)
        sample.append([0], logprobs=[-2.0], weight_versions=[5])
        sample.status, sample.reward, sample.response = SampleStatus.completed, reward, "a cb"
        samples.append(sample)
    return Group(index=index, prompt=prompt, samples=samples)


def open_log(folder: Path, *, num_samples: int = 2, resume_at: int = 0) -> RolloutLog:
    return RolloutLog(folder, num_samples=num_samples, text_of=PIECES.__getitem__, resume_at_step=resume_at)


def write(log: RolloutLog, step: int, groups: list[Group]) -> None:
    values = np.array([-0.125, -1.0, np.nan, -2.0], dtype=np.float32)
    log.write(step, groups, logprobs=dict.fromkeys(log.choose(groups), values))


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_stored_sample_has_all_fields_of_the_viewer(tmp_path: Path) -> None:
    write(open_log(tmp_path, num_samples=1), 3, [group(7)])
    (record,) = lines(tmp_path / SAMPLES_FILE)
    assert record == {
        "step": 3,
        "index": 14,
        "group": 7,
        "row": 7,
        "status": "completed",
        "reward": 1.0,
        "label": "a c",
        "prompt": "ab",
        "response": "a cb",
        "token_ids": [1, 3, 2, 0],
        "tokens": ["a", " c", "b", "<end>"],
        "loss_mask": [[1, 2], [0, 1], [1, 1]],
        "weight_versions": [[4, 2], [5, 2]],
        "engine_logprobs": [-0.1234568, -1.0, 0.0, -2.0],
        "trainer_logprobs": [-0.125, -1.0, None, -2.0],
    }


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path: Path) -> None:
    half = "\ud83d"  # JSON of a label, or of a call that the policy wrote, may have it; UTF-8 has none
    made = group(7)
    made.samples[0].prompt = replace(made.prompt, label=half)
    call = {"type": "function", "function": {"name": "f", "arguments": f'{{"a": "é{half}"}}'}}
    messages = ({"role": "assistant", "tool_calls": [call]},)
    made.samples[0].turns = (SampleTurn(number=0, num_tokens=4, sampled=True, messages=messages),)
    write(open_log(tmp_path, num_samples=1), 3, [made])
    assert lines(tmp_path / SAMPLES_FILE)[0]["label"] == half
    (talk,) = lines(tmp_path / TRAJECTORIES_FILE)
    assert talk["turns"][0]["messages"][0]["tool_calls"][0]["arguments"] == f'{{"a": "é{half}"}}'


def test_sft_samples_have_no_engine_logprobs(tmp_path: Path) -> None:
    write(open_log(tmp_path, num_samples=1), 0, [group(0, reward=None)])
    (record,) = lines(tmp_path / SAMPLES_FILE)
    assert record["engine_logprobs"] is None and record["reward"] is None
    assert "reward" not in lines(tmp_path / DISTRIBUTIONS_FILE)[0]


@pytest.mark.parametrize(
    ("num_samples", "num_groups", "size", "expected"),
    [
        (0, 3, 2, ()),
        (2, 4, 4, (0, 9)),  # the first of the first group, the second of the third
        (4, 4, 2, (0, 3, 4, 7)),
        (3, 2, 2, (0, 1, 3)),
        (4, 2, 2, (0, 1, 2, 3)),
        (8, 4, 4, (0, 1, 5, 6, 10, 11, 12, 15)),
        (9, 1, 1, (0,)),
        (3, 1, 8, (0, 1, 2)),
    ],
)
def test_stored_samples_are_spread(num_samples: int, num_groups: int, size: int, expected: tuple[int, ...]) -> None:
    groups = [group(i, size) for i in range(num_groups)]
    assert RolloutLog(Path(), num_samples=num_samples, text_of=str, resume_at_step=0).choose(groups) == expected


def test_groups_whose_samples_all_failed_have_none_to_store() -> None:
    """A rollout function of the user may return such groups."""
    groups = [group(0, 0), group(1), group(2, 0), group(3)]
    for num_samples, expected in ((1, (0,)), (2, (0, 3)), (9, (0, 1, 2, 3))):
        assert RolloutLog(Path(), num_samples=num_samples, text_of=str, resume_at_step=0).choose(groups) == expected


def test_a_run_without_a_trainer_stores_samples_with_the_logprobs_of_the_engine(tmp_path: Path) -> None:
    with open_console("none", title="test", total=1) as console:
        files = RolloutFiles(rollouts=open_log(tmp_path, num_samples=3))
        Observer(console=console, sinks=[], diff_limit=1.0, files=files).generated(0, [group(0), group(1)], version=0)
    samples = lines(tmp_path / SAMPLES_FILE)
    assert [each["index"] for each in samples] == [0, 1, 3]
    assert samples[0]["engine_logprobs"][1] == -1.0 and samples[0]["trainer_logprobs"] == [None] * 4
    assert len(lines(tmp_path / TRAJECTORIES_FILE)) == 3


def test_a_checkpoint_relies_on_all_files_that_are_written(tmp_path: Path) -> None:
    write(open_log(tmp_path), 0, [group(0)])
    assert {file.name for file in tmp_path.iterdir()} <= set(STEP_FILES)


def test_distributions_are_written_without_samples(tmp_path: Path) -> None:
    write(open_log(tmp_path, num_samples=0), 0, [group(0), group(1, reward=0.5)])
    assert not (tmp_path / SAMPLES_FILE).exists()
    assert lines(tmp_path / DISTRIBUTIONS_FILE) == [
        {"step": 0, "response_len": [[4.0, 4]], "reward": [[0.5, 2], [1.0, 2]]}
    ]


def test_a_resumed_run_writes_the_same_files_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = open_log(tmp_path / "whole") if (tmp_path / "whole").mkdir() is None else None
    assert whole is not None
    for step in range(5):
        write(whole, step, [group(step)])
    (tmp_path / "broken").mkdir()
    first = open_log(tmp_path / "broken")
    for step in range(4):
        write(first, step, [group(step, reward=0.25)] if step > 1 else [group(step)])
    with (tmp_path / "broken" / SAMPLES_FILE).open("a") as file:
        file.write('{"step": 4, "ind')  # the process died here
    second = open_log(tmp_path / "broken", resume_at=2)
    for step in (2, 3):
        write(second, step, [group(step, reward=0.75)])
    second.rewind(2)  # a trainer died
    for step in range(2, 5):
        write(second, step, [group(step)])
    for name in (SAMPLES_FILE, DISTRIBUTIONS_FILE):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_cut_lines_keeps_complete_lines_of_earlier_steps(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text('{"step": 0}\n{"step": 0}\n{"step": 1}\n{"step": 1')
    cut_lines(file, 9)
    assert file.read_text() == '{"step": 0}\n{"step": 0}\n{"step": 1}\n'
    cut_lines(file, 1)
    assert file.read_text() == '{"step": 0}\n{"step": 0}\n'
    cut_lines(file, 0)
    assert file.read_text() == ""


@pytest.mark.parametrize("bad", ["\0\0\0", "{}", "7"])
def test_a_line_that_cannot_be_cut_is_named(tmp_path: Path, bad: str) -> None:
    (file := tmp_path / "ledger.jsonl").write_text(f'{{"step":0}}\n{bad}\n')
    with pytest.raises(DataError, match=r"ledger.jsonl, row 2 must be an object with `step`, got '.*'; correct or"):
        cut_lines(file, 5)


def test_many_values_become_bins_with_the_same_total() -> None:
    assert distribution([3.0, 1.0, 3.0]) == [[1.0, 1], [3.0, 2]]
    binned = distribution([float(i) for i in range(1000)])
    assert len(binned) == MAX_VALUES
    assert sum(count for _, count in binned) == 1000
    assert [value for value, _ in binned] == sorted(value for value, _ in binned)
    assert binned[0][0] == pytest.approx(999 / MAX_VALUES / 2, rel=1e-6)


def test_a_leading_space_is_part_of_a_token() -> None:
    def strips(token_ids: Sequence[int]) -> str:
        """Drops the leading space, like tokenizers that mark words instead of spaces."""
        return decode(token_ids).removeprefix(" ")

    assert strips([3]) == "c"
    text_of = TokenTexts(strips, anchor=[1])
    assert [text_of(i) for i in (1, 3, 3, 0)] == ["a", " c", " c", "<end>"]


def test_a_part_of_a_character_has_a_text() -> None:
    def bytes_of(token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")

    text_of = TokenTexts(bytes_of, anchor=[65])
    assert [text_of(i) for i in (65, *"\u20ac".encode(), 66)] == ["A", "\ufffd", "\ufffd", "\ufffd", "B"]


def test_a_token_is_decoded_once() -> None:
    calls: list[Sequence[int]] = []

    def counts(token_ids: Sequence[int]) -> str:
        calls.append(token_ids)
        return decode(token_ids)

    text_of = TokenTexts(counts, anchor=[])
    assert [text_of(1) for _ in range(5)] == ["a"] * 5
    assert calls == [[], [1]]


def test_images_of_turns_are_files_which_messages_name(tmp_path: Path) -> None:
    content = b"\x89PNG picture"
    picture = Image(uri=to_data_url(content), digest=digest_of(content), grid=(1, 2, 2), token=3, num_tokens=1)
    parts = [{"type": "text", "text": "see"}, {"type": "image", "image": picture.digest}]
    found = group(0, size=1)
    (sample,) = found.samples
    message = {"role": "tool", "content": parts}
    turn = SampleTurn(number=0, num_tokens=sample.response_len, sampled=False, messages=(message,))
    found.samples[0] = replace(sample, images=(picture,), turns=(turn,))
    write(open_log(tmp_path, num_samples=1), 0, [found])
    assert f"[image {picture.digest}]" in (tmp_path / "trajectories.jsonl").read_text()
    assert (tmp_path / "images" / f"{picture.digest}.png").read_bytes() == content
