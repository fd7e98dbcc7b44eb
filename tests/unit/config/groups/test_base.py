"""Config groups: documented keys, no unknown keys, read-only after resolution."""

import dataclasses
import pickle
from copy import deepcopy

import pytest
from pydantic import TypeAdapter, ValidationError

from rlscale.config import AlgoConfig, BatchConfig, RunConfig, load_config
from rlscale.config.keys import keys


def test_every_key_is_described_and_optional_ones_say_what_none_means() -> None:
    for key in keys().values():
        assert key.description.endswith("."), key.path
        assert not key.optional or "None" in key.description or key.path == "run.experiment", key.path


def test_enum_names_are_their_values() -> None:
    for key in keys().values():
        if key.choices:
            assert [member.name for member in key.type] == [member.value for member in key.type], key.path


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="eps_clp"):
        TypeAdapter(AlgoConfig).validate_python({"eps_clp": 0.1})


def test_a_loaded_config_is_read_only() -> None:
    config = load_config()
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"BatchConfig\.micro_batch_size must not be written"):
        config.batch.micro_batch_size = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.batch = BatchConfig(rollout_batch_size=1)


def test_a_deep_copy_is_writable_in_every_group() -> None:
    config = load_config()
    copied = deepcopy(config)
    assert copied == config
    copied.algo.mis.low = 0.5
    assert config.algo.mis.low is None


def test_a_copy_may_differ_and_leaves_the_original() -> None:
    config = load_config()
    other = dataclasses.replace(config, batch=dataclasses.replace(config.batch, micro_batch_size=7))
    assert (other.batch.micro_batch_size, config.batch.micro_batch_size) == (7, 1)
    other.batch.micro_batch_size = 8


def test_a_pickled_config_stays_read_only() -> None:
    config = load_config()
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        copy.optim.lr = 1.0


def test_groups_can_be_made_by_hand() -> None:
    config = RunConfig(batch=BatchConfig(rollout_batch_size=4))
    config.batch.n_samples_per_prompt = 2
    assert config.algo == AlgoConfig()


def test_a_writable_copy_of_a_frozen_config_changes_alone() -> None:
    config = load_config([])
    copy = config.writable_copy()
    copy.algo.mis.low = 0.25
    assert config.algo.mis.low is None
    assert config == load_config([])
