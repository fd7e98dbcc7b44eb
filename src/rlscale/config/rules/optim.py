"""Rules about optimiser and learning-rate schedule."""

from __future__ import annotations

from rlscale.config.groups.optim import LrDecayStyle, OptimConfig, OptimizerName
from rlscale.config.groups.train import TrainBackendName
from rlscale.config.problems import show
from rlscale.config.rules.rule import IgnoredKey, rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem


@rule
def one_warmup(config: RunConfig) -> list[Problem]:
    """`optim.lr_warmup_iters` replaces the default of `optim.warmup_ratio`, and contradicts a given one."""
    optim = config.optim
    if optim.lr_warmup_iters == 0 or not optim.warmup_ratio:
        return []
    rule, fix = f"be 0 with optim.warmup_ratio={optim.warmup_ratio:g}", "set it to 0, or optim.warmup_ratio=null"
    return [Problem(path="optim.lr_warmup_iters", rule=rule, value=show(optim.lr_warmup_iters), fix=fix)]


def default_lr(backend: TrainBackendName) -> float:
    """The value of `optim.lr` where it is not set."""
    return 2e-5 if backend == TrainBackendName.fsdp else 1e-6


@rule
def schedule_is_ordered(config: RunConfig) -> list[Problem]:
    optim = config.optim
    problems = []
    lr = default_lr(config.train.backend) if optim.lr is None else optim.lr
    if optim.lr_decay_style != LrDecayStyle.constant and optim.min_lr > lr:
        rule, fix = f"be at most optim.lr={lr:g}", "lower it; the rate decays to it"
        problems.append(Problem(path="optim.min_lr", rule=rule, value=show(optim.min_lr), fix=fix))
    return problems + _check_decay_after_warmup(optim)


def _check_decay_after_warmup(optim: OptimConfig) -> list[Problem]:
    if optim.lr_decay_iters is None or optim.lr_decay_iters > optim.lr_warmup_iters:
        return []
    rule = f"be more than optim.lr_warmup_iters={optim.lr_warmup_iters}"
    fix = "raise it, or remove it to decay over the whole run; it includes the warm-up"
    return [Problem(path="optim.lr_decay_iters", rule=rule, value=show(optim.lr_decay_iters), fix=fix)]


@rule
def wsd_decay_fits(config: RunConfig) -> list[Problem]:
    optim = config.optim
    steps, last = optim.lr_decay_iters, optim.lr_wsd_decay_iters
    if optim.lr_decay_style != LrDecayStyle.wsd or steps is None or last is None or last <= steps:
        return []
    rule, fix = f"be at most optim.lr_decay_iters={steps}", "lower it; it counts the last of those steps"
    return [Problem(path="optim.lr_wsd_decay_iters", rule=rule, value=show(last), fix=fix)]


LR_BY_KIND = ("matrix_lr", "embedding_lr", "unembedding_lr")


@rule
def learning_rates_by_kind_need_a_base(config: RunConfig) -> list[Problem]:
    """The schedule belongs to `optim.lr`; the other rates are multiples of it."""
    given = [name for name in LR_BY_KIND if getattr(config.optim, name) is not None]
    if not given or config.optim.lr != 0:
        return []
    fix = "set it; the other rates are multiples of it. To train only some parameters use train.only_train_params"
    return [Problem(path="optim.lr", rule=f"be above 0 with optim.{given[0]}", value="0", fix=fix)]


IGNORED: tuple[IgnoredKey, ...] = (
    IgnoredKey(
        names=("optim.min_lr", "optim.lr_decay_iters"),
        when=lambda config: config.optim.lr_decay_style == LrDecayStyle.constant,
        why="optim.lr_decay_style is constant",
    ),
    IgnoredKey(
        names=("optim.lr_decay_power",),
        when=lambda config: config.optim.lr_decay_style != LrDecayStyle.polynomial,
        why="optim.lr_decay_style is not polynomial",
    ),
    IgnoredKey(
        names=("optim.lr_wsd_decay_iters", "optim.lr_wsd_decay_style"),
        when=lambda config: config.optim.lr_decay_style != LrDecayStyle.wsd,
        why="optim.lr_decay_style is not wsd",
    ),
    IgnoredKey(
        names=("optim.muon_momentum",),
        when=lambda config: config.optim.name != OptimizerName.muon,
        why="optim.name is not muon",
    ),
)
