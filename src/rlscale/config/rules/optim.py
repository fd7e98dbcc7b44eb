"""Rules about the learning-rate schedule."""

from __future__ import annotations

from rlscale.config.errors import show
from rlscale.config.groups.optim import LrDecayStyle, OptimConfig
from rlscale.config.keys import keys
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule("optim.lr_warmup_iters", "optim.warmup_ratio")
def one_warmup(config: RunConfig) -> list[Problem]:
    """The default ratio gives way to `lr_warmup_iters`; another one contradicts it."""
    optim = config.optim
    if optim.lr_warmup_iters == 0 or optim.warmup_ratio in (0, keys()["optim.warmup_ratio"].default):
        return []
    rule = f"be 0 with optim.warmup_ratio={optim.warmup_ratio:g}"
    fix = "keep one of them"
    return [Problem(path="optim.lr_warmup_iters", rule=rule, value=show(optim.lr_warmup_iters), fix=fix)]


@rule("optim.lr", "optim.min_lr", "optim.lr_decay_style", "optim.lr_warmup_iters", "optim.lr_decay_iters")
def schedule_is_ordered(config: RunConfig) -> list[Problem]:
    optim = config.optim
    problems = []
    if optim.lr_decay_style != LrDecayStyle.constant and optim.lr is not None and optim.min_lr > optim.lr:
        rule = f"be at most optim.lr={optim.lr:g}"
        fix = "the rate falls to it; lower it"
        problems.append(Problem(path="optim.min_lr", rule=rule, value=show(optim.min_lr), fix=fix))
    return problems + _decay_after_warmup(optim)


def _decay_after_warmup(optim: OptimConfig) -> list[Problem]:
    if optim.lr_decay_iters is None or optim.lr_decay_iters > optim.lr_warmup_iters:
        return []
    rule = f"be more than optim.lr_warmup_iters={optim.lr_warmup_iters}"
    fix = "the decay begins after the warm-up and counts it; raise it, or leave it out for the whole run"
    return [Problem(path="optim.lr_decay_iters", rule=rule, value=show(optim.lr_decay_iters), fix=fix)]


@rule("optim.lr_decay_style", "optim.lr_decay_iters", "optim.lr_wsd_decay_iters")
def fall_is_part_of_the_decay(config: RunConfig) -> list[Problem]:
    optim = config.optim
    steps, fall = optim.lr_decay_iters, optim.lr_wsd_decay_iters
    if optim.lr_decay_style != LrDecayStyle.wsd or steps is None or fall is None or fall <= steps:
        return []
    rule, fix = f"be at most optim.lr_decay_iters={steps}", "the fall is the end of the decay"
    return [Problem(path="optim.lr_wsd_decay_iters", rule=rule, value=show(fall), fix=fix)]


BY_KIND = ("matrix_lr", "embedding_lr", "unembedding_lr")


@rule("optim.lr", *(f"optim.{name}" for name in BY_KIND))
def rates_by_kind_have_a_base(config: RunConfig) -> list[Problem]:
    """The schedule is that of `optim.lr`; the others are multiples of it."""
    given = [name for name in BY_KIND if getattr(config.optim, name) is not None]
    if not given or config.optim.lr != 0:
        return []
    fix = "they follow its schedule; to train one kind alone use train.only_train_params"
    return [Problem(path="optim.lr", rule=f"be above 0 with optim.{given[0]}", value="0", fix=fix)]
