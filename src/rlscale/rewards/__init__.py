"""Rewards: built-in ones, those of users, and the runner that scores samples off the event loop."""

from rlscale.rewards.call_pool import PoolLimits
from rlscale.rewards.judge_client import JudgeClient, JudgeSpec
from rlscale.rewards.load_reward import BUILTINS, load_reward, needs_no_process, prepare_reward, with_judge, wrap_reward
from rlscale.rewards.reward_runner import RewardRunner
from rlscale.rewards.reward_spec import RewardFunctions, RewardSpec, RunReward
from rlscale.rewards.row_reward import find_row_types

__all__ = [
    "BUILTINS",
    "JudgeClient",
    "JudgeSpec",
    "PoolLimits",
    "RewardFunctions",
    "RewardRunner",
    "RewardSpec",
    "RunReward",
    "find_row_types",
    "load_reward",
    "needs_no_process",
    "prepare_reward",
    "with_judge",
    "wrap_reward",
]
