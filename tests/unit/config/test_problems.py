"""Suggestions for misspelt keys, groups, options and flags."""

import random
import re
from collections.abc import Iterable
from string import ascii_lowercase

import pytest

from rlscale.cli.arguments import FLAGS, parse_arguments
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.overrides import parse_command_line
from rlscale.config.keys import keys
from rlscale.config.problems import nearest
from rlscale.config.unknown_keys import nearest_key

GROUPS = ConfigFolders.find().groups()


def typos(word: str, number: int) -> list[str]:
    """A sample of the words that differ by one deletion, replacement, insertion or transposition."""
    found = set()
    for i in range(len(word)):
        found.add(word[:i] + word[i + 1 :])
        found.add(word[:i] + word[i + 1 : i + 2] + word[i] + word[i + 2 :])
        for letter in ascii_lowercase + "_.0":
            found |= {word[:i] + letter + word[i + 1 :], word[:i] + letter + word[i:]}
    return random.Random(word).sample(sorted(found - {word}), number)


def suggestion(override: str) -> str | None:
    """The name that the error of this override suggests, None without one; an empty text when the override is valid."""
    problems = parse_command_line([override], GROUPS).problems
    if not problems:
        return ""
    found = re.search("did you mean ([^?=]+)", problems[0].fix)
    return found.group(1) if found else None


def share_right(pairs: Iterable[tuple[str, str]]) -> float:
    """The share of overrides whose error suggests the meant name, without overrides that are valid by chance."""
    suggestions = [(suggestion(override), meant) for override, meant in pairs]
    of_errors = [(given, meant) for given, meant in suggestions if given != ""]
    return sum(given == meant for given, meant in of_errors) / len(of_errors)


@pytest.mark.slow
def test_typos_of_keys_are_recognised() -> None:
    assert share_right((f"{typo}=1", path) for path in keys() for typo in typos(path, 2)) >= 0.95


@pytest.mark.slow
def test_typos_of_groups_are_recognised() -> None:
    pairs = ((f"{typo}={GROUPS[group][0]}", group) for group in GROUPS for typo in typos(group, 60))
    assert share_right(pairs) >= 0.95


@pytest.mark.slow
def test_typos_of_options_are_recognised() -> None:
    pairs = [(f"{group}={typo}", name) for group in GROUPS for name in GROUPS[group] for typo in typos(name, 10)]
    assert share_right(pairs) >= 0.95


@pytest.mark.slow
def test_typos_of_choices_are_recognised() -> None:
    pairs = [(f"{key.path}={typo}", one) for key in keys().values() for one in key.choices for typo in typos(one, 10)]
    assert share_right(pairs) >= 0.95


def test_typos_of_flags_are_recognised() -> None:
    fixes = [
        (arguments.problems[0].fix, flag)
        for flag in FLAGS
        for typo in typos(flag[2:], 20)
        if (arguments := parse_arguments([f"--{typo}", "job"])).problems
    ]
    right = sum(fix == f"did you mean {flag}?" for fix, flag in fixes)
    assert len(fixes) > 10 * len(FLAGS) and right / len(fixes) >= 0.95


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
def test_other_similar_names(typed: str, meant: str | None) -> None:
    assert nearest_key(typed) == meant


def test_nothing_is_suggested_without_a_similar_name() -> None:
    assert nearest("xylophone", ["grpo", "gspo"]) is None
    assert nearest("", []) is None
