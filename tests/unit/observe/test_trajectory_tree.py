"""Records of trajectories for the report."""

from dataclasses import replace
from typing import Any

from rlscale.observe.trajectory_tree import MAX_CHARS, MAX_TURNS, trajectory_tree
from rlscale.trajectory import Trajectory
from rlscale.types import Prompt, Sample, SampleStatus
from tests.unit.observe.report.made_conversations import Maker, failed_trajectory, tool_trajectory, tree_trajectory


def tree(samples: list[Sample]) -> dict[str, Any]:
    return trajectory_tree(samples, lambda token: f"<{token}>")


def test_turns_have_messages_times_masks_and_versions() -> None:
    record = tree(tool_trajectory(8).samples())
    assert (record["index"], record["group"], record["row"], record["status"]) == (8, 2, 8, "completed")
    assert (record["reward"], record["failure"], record["label"], record["counts"]) == (
        1.0,
        None,
        "395",
        {"turns": 3, "tool_calls": 3},
    )
    assert [message["role"] for message in record["prompt"]] == ["system", "user"]
    first, given, second, *_ = record["turns"]
    assert first["messages"][0]["tool_calls"][0] == {"name": "multiply", "arguments": '{"a": 17, "b": 23}'}
    assert first["messages"][0]["reasoning_content"] == "First 17 * 23."
    assert (first["sampled"], first["tokens"], first["trained"], first["versions"]) == (True, 12, 12, [3])
    assert (first["seconds"], second["seconds"]) == ([0.0, 1.0], [1.4, 2.4])
    assert (given["sampled"], given["tokens"], given["trained"], given["versions"]) == (False, 20, 0, [])
    assert [message["name"] for message in given["messages"]] == ["multiply", "search"]
    assert second["messages"][0]["tool_calls"][0]["arguments"] == '{"a": 391, "b": '


def test_shared_turns_are_there_once_and_a_sub_agent_has_its_prompt() -> None:
    record = tree(tree_trajectory(0).samples())
    assert [(turn["number"], turn["parent"]) for turn in record["turns"]] == [
        (0, None),
        (1, 0),
        (2, 1),
        (3, 1),
        (4, None),
        (5, 4),
    ]
    assert [turn["own_prompt"] for turn in record["turns"]] == [False] * 4 + [True, False]
    assert [turn["trained"] for turn in record["turns"]] == [12, 0, 12, 12, 0, 12]
    assert record["turns"][4]["messages"][1]["content"] == "391 + 4" and record["turns"][4]["tokens"] == 3


def test_the_prompt_is_that_of_the_agent() -> None:
    trajectory = Trajectory(id=0, group_index=0, seed=0, prompt=Prompt(index=0, text="row", token_ids=(1,)))
    start = trajectory.extend([], parent=None)
    messages = ({"role": "system", "content": "Be short."}, {"role": "user", "content": "row"})
    trajectory.turns[start].messages = messages
    trajectory.turns[start].prompt = replace(trajectory.prompt, token_ids=(1, 2, 3))
    answers = [
        trajectory.extend([token], sampled=True, logprobs=[-1.0], weight_versions=[0], text="4", parent=start)
        for token in (4, 5)
    ]
    record = tree(trajectory.samples())
    assert record["prompt"] == list(messages) and record["prompt_tokens"] == 3
    assert [(turn["number"], turn["parent"]) for turn in record["turns"]] == [(number, None) for number in answers]


def test_a_failure_is_the_outcome() -> None:
    record = tree(failed_trajectory(0).samples())
    assert record["failure"].startswith("sandbox: a sandbox ended") and record["reward"] is None


def test_samples_that_do_not_know_their_turns_are_cut_at_changes_of_the_mask() -> None:
    prompt = Prompt(index=0, text="question", token_ids=(1,))
    sample = Sample(index=0, group_index=0, prompt=prompt, seed=0, status=SampleStatus.completed)
    sample.append([2, 3], logprobs=[0.0, 0.0], weight_versions=[1, 1])
    sample.append([4], logprobs=[0.0], weight_versions=[1], trainable=False)
    other = replace(sample, path=1)
    record = tree([sample, other])
    assert record["prompt"] == [{"role": "prompt", "content": "question"}]
    assert [(turn["text"], turn["sampled"], turn["parent"]) for turn in record["turns"][:2]] == [
        ("<2><3>", True, None),
        ("<4>", False, 0),
    ]
    assert len(record["turns"]) == 4


def test_long_texts_and_long_trajectories_are_cut() -> None:
    made = Maker(0, {"role": "user", "content": [{"type": "text", "text": "x" * (MAX_CHARS + 5)}]})
    for _ in range(MAX_TURNS + 3):
        made.answer("yes")
    record = tree(made.end(0.0).samples())
    assert record["prompt"][0]["content"].endswith("x ... (5 more characters)")
    assert (len(record["turns"]), record["num_turns"]) == (MAX_TURNS, MAX_TURNS + 3)
