"""Builds source, evaluator, loop config and weight channel of a run from its prepared data."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rlscale.cluster.ray_session import Bundles
from rlscale.config import WeightChannelName
from rlscale.control.engine_sleep import released_engines
from rlscale.control.loop_config import LoopConfig
from rlscale.driver.external_engines import are_local
from rlscale.driver.prepared_run import PreparedRun
from rlscale.errors import ConfigError, Problem
from rlscale.evaluation.evaluator import Evaluator
from rlscale.evaluation.sft_loss import HeldOutLoss, LabelledSet
from rlscale.protocols import RolloutSource, Trainers
from rlscale.rewards import RewardRunner
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generated import GeneratedRollouts, sampling_params
from rlscale.rollout.sft import labelled_group
from rlscale.weights.channel_spec import ChannelSpec
from rlscale.worker.rank import WorldSpec


def build_loop_config(prepared: PreparedRun) -> LoopConfig:
    """The run's config with the number of its rollouts."""
    return LoopConfig(
        run=prepared.config, num_rollouts=prepared.num_rollouts, rollouts_per_epoch=prepared.rollouts_per_epoch
    )


@contextmanager
def open_rewards(prepared: PreparedRun) -> Iterator[RewardRunner | None]:
    """The threads that compute rewards; None: the run generates nothing."""
    if prepared.reward is None:
        yield None
        return
    with RewardRunner(prepared.reward, max_workers=prepared.config.reward.max_workers) as runner:
        yield runner


def build_source(prepared: PreparedRun, pool: EnginePool | None, rewards: RewardRunner | None) -> RolloutSource:
    """Labels, saved rollouts, or rollouts that the engines generate."""
    given = prepared.sft or prepared.replay
    if given is not None:
        return given
    assert pool is not None and rewards is not None, "generation needs engines"
    config = prepared.config
    return GeneratedRollouts(
        prompts=prepared.prompts,
        pool=pool,
        rewards=rewards,
        params=sampling_params(config.rollout, routes=prepared.routes),
        batch=config.batch,
        reward_key=config.reward.key,
    )


def build_evaluator(
    prepared: PreparedRun,
    pool: EnginePool | None,
    rewards: RewardRunner | None,
    *,
    trainers: Trainers | None = None,
) -> Evaluator | None:
    """Evaluates `eval.prompt_data`; None: the run has no evaluation sets.

    Args:
        trainers: measure the loss of labels, too. None: there are none.
    """
    if not prepared.eval_sets:
        return None
    assert pool is not None and rewards is not None, "evaluation needs engines"
    held_out = None if trainers is None else _build_held_out_loss(prepared, pool, trainers)
    return Evaluator(sets=prepared.eval_sets, pool=pool, rewards=rewards, held_out=held_out)


def _build_held_out_loss(prepared: PreparedRun, pool: EnginePool, trainers: Trainers) -> HeldOutLoss:
    """The loss of `eval.num_batches` batches of each set; without sets where training is not supervised."""
    loop, tokenizer = build_loop_config(prepared), prepared.tokenizer
    sets = {
        name: LabelledSet.from_groups(
            [labelled_group(i, prompt, tokenizer, version=0) for i, prompt in enumerate(prompts)],
            prepared.config.batch,
            num_ranks=loop.num_ranks,
            context_ranks=loop.context_ranks,
        )
        for name, prompts in prepared.held_out.items()
    }
    if not loop.releases_engines:
        return HeldOutLoss(sets, compute=trainers.eval_loss)
    # Engines hold the trainer's GPUs during an evaluation, and release them for this part of it.
    return HeldOutLoss(sets, compute=trainers.eval_loss, scope=partial(released_engines, pool, trainers))


def build_world_spec(prepared: PreparedRun, bundles: Bundles, *, run_folder: Path) -> WorldSpec:
    """Process group of the trainer ranks, and their weight channel."""
    config = prepared.config
    return WorldSpec(
        world_size=prepared.layout.num_trainers,
        backend=config.cluster.distributed_backend,
        timeout_s=60.0 * config.cluster.distributed_timeout_minutes,
        single_node=bundles.num_nodes == 1 and are_local(config.rollout.external_engine_addrs or []),
        channel=_build_channel_spec(prepared, bundles, run_folder=run_folder),
    )


def _build_channel_spec(prepared: PreparedRun, bundles: Bundles, *, run_folder: Path) -> ChannelSpec:
    config = prepared.config
    name = config.train.weight_channel
    assert name is not None, "set by the resolve step"
    # Bundles from `first_critic` on are a critic's: it sends no weights, so that it may be on another node.
    if name == WeightChannelName.shared_memory and bundles.count_nodes(prepared.layout.first_critic) > 1:
        rule = "not be shared_memory, because Ray placed trainer and engines on several machines"
        fix = "use train.weight_channel=process_group"
        raise ConfigError([Problem(path="train.weight_channel", rule=rule, value=name, fix=fix)])
    return ChannelSpec(
        name=name,
        backend=config.cluster.distributed_backend,
        device=config.cluster.device,
        bucket_bytes=config.train.update_weight_buffer_size,
        timeout_s=60.0 * config.cluster.distributed_timeout_minutes,
        folder=Path(config.train.weight_folder or run_folder / "weights").absolute(),
        model_folder=Path(prepared.model_path),
        pause_mode=config.rollout.pause_mode,
    )
