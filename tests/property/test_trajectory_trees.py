"""Random trees of turns: samples contain what the engine saw, and train each sampled token once."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rlscale.trajectory import Trajectory, trajectory_from_sample
from rlscale.types import Prompt

# For each turn: whether it is sampled, its number of tokens, and its parent as a number that is taken modulo the turns.
turns = st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 100)), max_size=12)


def build(drawn: list[tuple[bool, int, int]]) -> Trajectory:
    trajectory, number = Trajectory(id=5, group_index=1, prompt=Prompt(index=0, text="", token_ids=(9,)), seed=0), 10
    for position, (sampled, num_tokens, parent) in enumerate(drawn):
        ids = list(range(number, number + num_tokens))
        number += num_tokens
        # parent % (position + 1) == position stands for the prompt.
        before = parent % (position + 1)
        trajectory.extend(
            ids,
            logprobs=[-0.5] * num_tokens if sampled else None,
            weight_versions=[position] * num_tokens if sampled else None,
            sampled=sampled,
            parent=None if before == position else before,
        )
    return trajectory


@given(turns)
def test_a_sample_is_the_path_from_the_prompt_to_a_leaf(drawn: list[tuple[bool, int, int]]) -> None:
    trajectory = build(drawn)
    leaves = [i for i in range(len(drawn)) if i not in {turn.parent for turn in trajectory.turns}]
    samples = trajectory.samples()
    assert len(samples) == max(1, len(leaves))
    for leaf, sample in zip(leaves, samples, strict=False):
        assert sample.tokens.tolist() == trajectory.token_ids(leaf)
        columns = (sample.loss_mask, sample.rollout_logprobs, sample.weight_versions)
        assert {len(column) for column in columns} == {len(sample.tokens) - 1}


@given(turns)
def test_every_sampled_token_is_trained_once_and_no_other(drawn: list[tuple[bool, int, int]]) -> None:
    trajectory = build(drawn)
    trained: Counter[int] = Counter()
    for sample in trajectory.samples():
        # Token ids are unique in the tree.
        trained.update(sample.tokens[sample.prompt_len :][sample.loss_mask == 1].tolist())
    sampled = [token for turn in trajectory.turns if turn.sampled for token in turn.token_ids.tolist()]
    assert trained == Counter(sampled)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=8))
def test_a_single_path_survives_the_way_through_its_sample(drawn: list[tuple[bool, int]]) -> None:
    trajectory = build([(sampled, num, max(position - 1, 0)) for position, (sampled, num) in enumerate(drawn)])
    (sample,) = trajectory.samples()
    again = trajectory_from_sample(sample)
    assert again.token_ids() == trajectory.token_ids()
    (same,) = again.samples()
    assert (same.loss_mask == sample.loss_mask).all() and (same.weight_versions == sample.weight_versions).all()
