"""Trajectories: trees of turns and their samples."""

import numpy as np
import pytest

from rlscale.trajectory import Trajectory, WeightSpan, trajectory_from_sample
from rlscale.types import Generation, Prompt, SampleStatus

PROMPT = Prompt(index=0, text="p", token_ids=(1, 2))


def answer(*tokens: int, version: int = 0, finish: str = "stop", text: str = "t") -> Generation:
    return Generation(
        output_ids=list(tokens),
        logprobs=[-0.5 * token for token in tokens],
        weight_versions=[version] * len(tokens),
        finish_reason=finish,
        text=text,
        engine="engine 0",
    )


def make_trajectory() -> Trajectory:
    return Trajectory(id=7, group_index=3, prompt=PROMPT, seed=1)


def test_turns_become_one_sample_whose_given_tokens_are_not_trained() -> None:
    trajectory = make_trajectory()
    trajectory.add_generation(answer(3, 4, version=2, text="call"))
    trajectory.extend([5], text="result")
    trajectory.add_generation(answer(6, version=3, text="end"))
    (sample,) = trajectory.samples()
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 6] == trajectory.token_ids()
    assert sample.loss_mask.tolist() == [1, 1, 0, 1]
    assert sample.rollout_logprobs.tolist() == [-1.5, -2.0, 0.0, -3.0]
    # A given token counts as made by the weights before it: it has no age.
    assert sample.weight_versions.tolist() == [2, 2, 2, 3]
    assert (sample.response, sample.index, sample.group_index) == ("callresultend", 7, 3)
    assert trajectory.num_sampled == 3 and trajectory.versions == {2, 3}


def test_a_sample_of_one_turn_shares_its_tokens_and_logprobs_and_none_of_them_can_be_changed() -> None:
    one, two = make_trajectory(), make_trajectory()
    for trajectory in (one, two):
        trajectory.add_generation(answer(3, 4))
    two.add_generation(answer(5))
    (sample,), turn = one.samples(), one.turns[0]
    assert np.shares_memory(sample.rollout_logprobs, turn.logprobs)
    assert np.shares_memory(sample.response_tokens, turn.token_ids)
    for column in (sample.rollout_logprobs, sample.response_tokens, sample.tokens):
        with pytest.raises(ValueError, match="read-only"):
            column[:] = 9
    sample.loss_mask[:] = 0  # as a hook may do
    assert one.samples()[0].loss_mask.tolist() == [1, 1] and one.token_ids() == [1, 2, 3, 4]
    assert not np.shares_memory(two.samples()[0].rollout_logprobs, two.turns[0].logprobs)


def test_the_answer_of_several_turns_is_the_last_one() -> None:
    trajectory = make_trajectory()
    trajectory.add_generation(answer(3, text="call"))
    (sample,) = trajectory.samples()
    assert sample.answer == sample.response == "call"
    trajectory.extend([5], text="result")
    trajectory.add_generation(answer(6, text="end"))
    (sample,) = trajectory.samples()
    assert (sample.answer, sample.response) == ("end", "callresultend")


def test_two_leaves_share_the_turns_before_them_and_train_them_once() -> None:
    trajectory = make_trajectory()
    first = trajectory.add_generation(answer(3, 4))
    trajectory.add_generation(answer(5), parent=first)
    trajectory.add_generation(answer(6, 7), parent=first)
    samples = trajectory.samples()
    assert [sample.tokens.tolist() for sample in samples] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7]]
    assert [sample.loss_mask.tolist() for sample in samples] == [[1, 1, 1], [0, 0, 1, 1]]
    assert [sample.path for sample in samples] == [0, 1]
    assert {sample.index for sample in samples} == {7}


def test_an_aborted_turn_continues_with_spans_of_both_versions() -> None:
    trajectory = make_trajectory()
    trajectory.add_generation(answer(3, version=1, finish="abort", text="a"))
    assert trajectory.status == SampleStatus.aborted
    trajectory.add_generation(answer(4, 5, version=2, finish="length", text="b"))
    assert len(trajectory.turns) == 1
    assert trajectory.turns[0].spans == [WeightSpan(1, 1), WeightSpan(2, 2)]
    (sample,) = trajectory.samples()
    assert sample.weight_versions.tolist() == [1, 2, 2] and sample.response == "ab"
    assert sample.status == SampleStatus.truncated


def test_a_sample_can_be_continued_as_a_trajectory() -> None:
    trajectory = make_trajectory()
    trajectory.add_generation(answer(3, version=1))
    trajectory.extend([4])
    trajectory.add_generation(answer(5, version=2, finish="abort"))
    (sample,) = trajectory.samples()
    (again,) = trajectory_from_sample(sample).samples()
    assert again == sample
    assert trajectory_from_sample(sample).token_ids() == trajectory.token_ids()


def test_a_trajectory_without_turns_is_one_sample_without_response() -> None:
    (sample,) = make_trajectory().samples()
    assert sample.response_len == 0 and sample.tokens.tolist() == [1, 2]
    assert trajectory_from_sample(sample).turns == []


def test_routes_of_the_first_generation_stay() -> None:
    trajectory = make_trajectory()
    routes = np.full((3, 2, 1), 5, np.uint8)
    first = answer(3, 4)
    trajectory.add_generation(Generation(**{**_fields(first), "routes": routes}))
    later = np.full((5, 2, 1), 6, np.uint8)
    trajectory.add_generation(Generation(**{**_fields(answer(5, 6)), "routes": later}))
    (sample,) = trajectory.samples()
    assert sample.routes is not None
    # The last token of a generation gets its route with the next one; the very last has none.
    assert sample.routes[:, 0, 0].tolist() == [5, 5, 5, 6, 6, 255]


def test_tokens_between_two_turns_get_their_routes_with_the_second() -> None:
    trajectory = make_trajectory()
    first, second = (np.full((n, 2, 1), value, np.uint8) for n, value in ((3, 5), (6, 6)))
    trajectory.add_generation(Generation(**{**_fields(answer(3, 4)), "routes": first}))
    trajectory.extend([5], text="result of a tool")
    trajectory.add_generation(Generation(**{**_fields(answer(6, 7)), "routes": second}))
    (sample,) = trajectory.samples()
    assert sample.routes is not None and sample.loss_mask.tolist() == [1, 1, 0, 1, 1]
    # The first turn keeps the routes of its generation; token 4, its last, and the tool's 5 were read for the second.
    assert sample.routes[:, 0, 0].tolist() == [5, 5, 5, 6, 6, 6, 255]


@pytest.mark.parametrize("parent", [1, 5])
def test_a_parent_must_be_an_earlier_turn(parent: int) -> None:
    trajectory = make_trajectory()
    trajectory.extend([3])
    with pytest.raises(ValueError, match=f"earlier turn, got {parent}"):
        trajectory.extend([4], parent=parent)


def test_sampled_tokens_need_logprobs() -> None:
    with pytest.raises(ValueError, match="must have logprobs"):
        make_trajectory().extend([3], sampled=True)


def test_a_restart_forgets_everything() -> None:
    trajectory = make_trajectory()
    trajectory.add_generation(answer(3))
    trajectory.metadata["tool"] = 1
    trajectory.restart()
    assert (trajectory.turns, trajectory.metadata, trajectory.status) == ([], {}, SampleStatus.pending)


def _fields(generation: Generation) -> dict[str, object]:
    return {name: getattr(generation, name) for name in Generation.__slots__}
