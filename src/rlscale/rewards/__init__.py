"""Rewards: built-in ones, those of users, and the runner that scores groups off the event loop."""

from rlscale.rewards.load_reward import BUILTINS, load_reward
from rlscale.rewards.reward_runner import RewardRunner

__all__ = ["BUILTINS", "RewardRunner", "load_reward"]
