"""A misspelt key or option gets the right advice."""

import random
from collections.abc import Iterator
from string import ascii_lowercase

import pytest

from rlscale.config.folder import ConfigFolders
from rlscale.config.schema import keys
from rlscale.config.suggest import nearest, nearest_key


def single_edits(word: str, seed: int) -> Iterator[str]:
    """One deletion, replacement, insertion and transposition, at random places."""
    draw = random.Random(f"{word}{seed}")
    place, letter = draw.randrange(len(word) - 1), draw.choice(ascii_lowercase)
    yield word[:place] + word[place + 1 :]
    yield word[:place] + letter + word[place + 1 :]
    yield word[:place] + letter + word[place:]
    yield word[:place] + word[place + 1] + word[place] + word[place + 2 :]


def test_single_typos_of_keys_are_recognised() -> None:
    typos = [
        (path, typo) for path in keys() for seed in range(8) for typo in single_edits(path, seed) if typo not in keys()
    ]
    right = sum(nearest_key(typo) == path for path, typo in typos)
    assert right / len(typos) >= 0.95


def test_single_typos_of_options_are_recognised() -> None:
    for group, options in ConfigFolders.find().groups().items():
        typos = [(name, typo) for name in options for seed in range(8) for typo in single_edits(name, seed)]
        right = sum(nearest(typo, options) == name for name, typo in typos)
        assert right / len(typos) >= 0.95, group


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("eps_clip", "algo.eps_clip"),
        ("rollout_batch_size", "batch.rollout_batch_size"),
        ("--rollout-max-response-len", "rollout.max_response_len"),
        ("--num-rollout", "data.num_rollout"),
        ("--wandb-project", "logging.wandb.project"),
        ("wandb.key", "logging.wandb.key"),
        ("logging.wandb.projct", "logging.wandb.project"),
        ("logging.wand.enabled", "logging.wandb.enabled"),
        ("--tensorboard-dir", "logging.tensorboard.dir"),
        ("data.rollout_batch_size", "batch.rollout_batch_size"),
        ("algorithm.kl_loss_coef", "algo.kl_loss_coef"),
        ("trainer.dtype", "train.dtype"),
        ("evl.temprature", "eval.temperature"),
        ("learning_rte_of_everything", None),
        ("zzz.qqq", None),
    ],
)
def test_other_ways_to_be_near(typed: str, meant: str | None) -> None:
    assert nearest_key(typed) == meant


def test_nothing_is_suggested_when_all_is_far() -> None:
    assert nearest("xylophone", ["grpo", "gspo"]) is None
    assert nearest("", []) is None
