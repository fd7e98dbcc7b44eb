"""The separate pass for old logprobs runs only where it is needed."""

from typing import Any

import pytest

from rlscale.config import MisConfig
from rlscale.training.prepare import needs_old_pass
from tests.unit.training.rollouts import spec

MIS = {"use_tis": True, "tis_type": "mis", "mis": MisConfig(normalize=True)}


@pytest.mark.parametrize(
    ("changes", "num_steps", "trains_policy", "expected"),
    [
        ({}, 1, True, False),  # the training pass has the old weights
        ({}, 2, True, True),  # later steps are not
        ({"algo": {"ppo_epochs": 2}}, 1, True, True),  # nor is a second pass
        ({"reuse_logprobs": False}, 1, True, True),
        (
            {"algo": {"kl_coef": 0.1, "advantage_estimator": "rloo"}},
            1,
            True,
            True,
        ),  # the KL penalty is part of the rewards, before the loss
        ({"algo": {"opd_kl_coef": 0.1}}, 1, True, True),
        ({"algo": MIS}, 1, True, True),  # so is the mean weight of the rollout
        ({"algo": {"use_tis": True}}, 1, True, False),
        ({"num_old_policies": 1}, 1, True, True),
        ({"algo": {"use_rollout_logprobs": True}}, 2, True, False),  # the engine's logprobs are the old ones
        ({"algo": {"use_rollout_logprobs": True, "use_rollout_entropy": True}}, 2, True, True),
        ({"algo": {"use_rollout_logprobs": True, "use_rollout_entropy": True}}, 1, True, False),
        ({"algo": {"use_rollout_entropy": True}}, 1, True, False),
        ({}, 2, False, False),  # only the critic trains
        ({"algo": {"kl_coef": 0.1, "advantage_estimator": "ppo"}}, 1, False, True),  # its returns need the penalty
    ],
)
def test_the_old_pass_runs_only_where_it_is_needed(
    changes: dict[str, Any], num_steps: int, trains_policy: bool, expected: bool
) -> None:
    assert needs_old_pass(spec("model", **changes), num_steps=num_steps, trains_policy=trains_policy) is expected
