"""Values of parts that are not there yet are known by name, and refused with what to choose instead."""

import pytest

from rlscale.config.schema import keys
from rlscale.config.unbuilt import BUILT
from tests.unit.config.mistakes import only_mistake

CASES = [
    ("train=megatron", "train.backend must be one of the parts built so far (fsdp), got megatron; choose train=fsdp"),
    ("rollout.engine=external", "rollout.engine must be one of the parts built so far (embedded, sglang), got"),
    ("optim.name=muon", "optim.name must be one of the parts built so far (adam), got muon"),
    (
        "optim.lr_decay_style=wsd",
        "optim.lr_decay_style must be one of the parts built so far (constant, linear, cosine)",
    ),
    ("algo.advantage_estimator=ppo", "algo.advantage_estimator must be one of the parts built so far"),
    ("algo=ppo", "algo.advantage_estimator must be one of the parts built so far"),
    ("algo.opd_kl_coef=0.1", "algo.opd_kl_coef must be one of the parts built so far (0.0), got 0.1"),
    ("algo.use_routing_replay=true", "algo.use_routing_replay must be one of the parts built so far (false)"),
    ("reward.type=f1", "reward.type must be one of the parts built so far (null, exact_match, math, random), got f1"),
]


@pytest.mark.parametrize(("word", "told"), CASES, ids=[word for word, _ in CASES])
def test_an_unbuilt_value_is_refused(word: str, told: str) -> None:
    assert told in only_mistake([word])


def test_every_entry_names_a_key_and_values_of_its_type() -> None:
    assert {word.partition("=")[0] for word, _ in CASES if "." in word} | {"train.backend", "rollout.engine"} == set(
        BUILT
    )
    for path, built in BUILT.items():
        assert all(value is None or isinstance(value, keys()[path].type) for value in built.values), path
