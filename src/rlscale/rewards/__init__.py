"""Rewards: the built-in ones, users' own, and the runner that scores groups off the event loop."""

from rlscale.rewards.load import BUILTINS, load_reward
from rlscale.rewards.runner import RewardRunner

__all__ = ["BUILTINS", "RewardRunner", "load_reward"]
