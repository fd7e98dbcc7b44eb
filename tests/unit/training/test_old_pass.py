"""The extra pass for old logprobs is made where something needs it, and nowhere else."""

from typing import Any

import pytest

from rlscale.config import MisConfig
from rlscale.training.prepare import needs_old_pass
from tests.unit.training.rollouts import spec

MIS = {"use_tis": True, "tis_type": "mis", "mis": MisConfig(normalize=True)}


@pytest.mark.parametrize(
    ("changes", "num_steps", "trains_policy", "expected"),
    [
        ({}, 1, True, False),  # the training pass is made by the very weights that are old
        ({}, 2, True, True),  # later steps are not
        ({"reuse_logprobs": False}, 1, True, True),
        ({"algo": {"kl_coef": 0.1, "advantage_estimator": "rloo"}}, 1, True, True),  # rewards come before the loss
        ({"algo": {"opd_kl_coef": 0.1}}, 1, True, True),
        ({"algo": MIS}, 1, True, True),  # the mean weight of the rollout, too
        ({"algo": {"use_tis": True}}, 1, True, False),
        ({"num_old_policies": 1}, 1, True, True),
        ({"algo": {"use_rollout_logprobs": True}}, 2, True, False),  # those of the engine are old
        ({"algo": {"use_rollout_logprobs": True, "use_rollout_entropy": True}}, 2, True, True),
        ({"algo": {"use_rollout_logprobs": True, "use_rollout_entropy": True}}, 1, True, False),
        ({"algo": {"use_rollout_entropy": True}}, 1, True, False),
        ({}, 2, False, False),  # the critic trains alone
        ({"algo": {"kl_coef": 0.1, "advantage_estimator": "ppo"}}, 1, False, True),  # but its returns need the penalty
    ],
)
def test_the_pass_is_made_where_something_needs_it(
    changes: dict[str, Any], num_steps: int, trains_policy: bool, expected: bool
) -> None:
    assert needs_old_pass(spec("model", **changes), num_steps=num_steps, trains_policy=trains_policy) is expected
