"""The table of estimators agrees with the enum of the config and with the policy losses."""

import pickle

from rlscale.algo.advantages import ESTIMATORS
from rlscale.algo.losses import POLICY_LOSSES
from rlscale.config import AdvantageEstimator


def test_the_table_and_the_enum_agree() -> None:
    assert list(ESTIMATORS) == [member.value for member in AdvantageEstimator]
    for name, estimator in ESTIMATORS.items():
        assert callable(estimator.compute) and estimator.policy_loss in POLICY_LOSSES
        assert estimator.paper.startswith("arXiv:")
        member = AdvantageEstimator(name)
        assert member.name == name and pickle.loads(pickle.dumps(member)) is member
