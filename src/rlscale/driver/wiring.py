"""Builds source, evaluator, loop config and weight channel of a run from its prepared data."""

from functools import partial
from operator import attrgetter
from pathlib import Path

from rlscale.cluster.ray_session import Bundles
from rlscale.config import LossType
from rlscale.config.groups.algo import AdvantageEstimator, compares_policies
from rlscale.config.rules import reads_buffer, uses_engines
from rlscale.control.engine_sleep import released_engines
from rlscale.control.loop_config import LoopConfig
from rlscale.control.rollout_hooks import RolloutHooks
from rlscale.driver.buffer_source import build_buffer_source
from rlscale.driver.external_engines import are_local
from rlscale.driver.open_generate import Generators
from rlscale.driver.open_rewards import OpenRewards
from rlscale.driver.open_teachers import build_teachers
from rlscale.driver.prepared_run import PreparedRun
from rlscale.evaluation.evaluator import Evaluator
from rlscale.evaluation.load_sets import EvalSet
from rlscale.evaluation.sft_loss import HeldOutLoss, LabelledSet
from rlscale.evaluation.user_evaluator import UserEvaluator
from rlscale.observe.dumps import RolloutDump
from rlscale.observe.evaluation_files import EvaluationFiles
from rlscale.plan.placement import further_engines
from rlscale.plugins.args_view import Args
from rlscale.plugins.load_plugin import load_plugin
from rlscale.plugins.user_hook import UserHook
from rlscale.protocols import RolloutSource, Trainers
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_session import SessionFactory
from rlscale.rollout.generated import GeneratedRollouts, eval_params, sampling_params
from rlscale.rollout.group_filters import GroupFilters, by_named_rewards
from rlscale.rollout.sft import labelled_group
from rlscale.rollout.timeline import Timelines
from rlscale.rollout.user_rollout import UserRollout
from rlscale.weights.channel_spec import ChannelSpec
from rlscale.worker.rank import WorldSpec


def build_loop_config(prepared: PreparedRun) -> LoopConfig:
    """The run's config with the number of its rollouts."""
    return LoopConfig(
        run=prepared.config,
        num_rollouts=prepared.num_rollouts,
        rollouts_per_epoch=prepared.rollouts_per_epoch,
        forward_cost=prepared.forward_cost,
        policy_cost=prepared.policy_cost,
    )


def build_timelines(prepared: PreparedRun) -> Timelines | None:
    """Timelines of trajectories; None: the run generates none."""
    given = prepared.sft or prepared.replay
    return Timelines(prepared.config.logging.num_timelines) if given is None else None


def build_source(
    prepared: PreparedRun,
    pool: EnginePool | None,
    rewards: OpenRewards | None,
    *,
    folder: Path,
    timelines: Timelines | None = None,
    generators: Generators | None = None,
) -> RolloutSource:
    """Labels, saved rollouts, rollouts of the buffer service, or rollouts that the engines generate.

    Args:
        folder: of the run.
        generators: generate trajectories; None: one request does.
    """
    given, config = prepared.sft or prepared.replay, prepared.config
    if given is not None:
        return given
    assert pool is not None, "generation needs engines"
    if reads_buffer(config):
        return build_buffer_source(prepared, pool, folder=folder, filters=_load_filters(prepared))
    assert rewards is not None, "samples of engines need rewards"
    source = GeneratedRollouts(
        prompts=prepared.prompts,
        sessions=SessionFactory(
            pool,
            sampling_params(config.rollout, routes=prepared.routes),
            config=config,
            tokenizer=prepared.tokenizer,
            timelines=timelines,
        ),
        rewards=rewards.training,
        config=config,
        filters=_load_filters(prepared),
        generate=None if generators is None else generators.find(),
    )
    source.set_teachers(build_teachers(config, vocab_size=prepared.vocab_size))
    return source


def _args(prepared: PreparedRun) -> Args:
    """`args` of functions in slime's form; the model may have been built or downloaded."""
    return Args(prepared.config, runtime={"hf_checkpoint": prepared.model_path})


def _load_filters(prepared: PreparedRun) -> GroupFilters:
    """The filters of the config group `sampling`. Those of users run in threads, with a deadline."""
    config = prepared.config

    def load(key: str, path: str | None) -> UserHook | None:
        if path is None:
            return None
        function = load_plugin(key, path, args=_args(prepared), custom=config.custom)
        return UserHook(key=key, function=function, timeout_s=config.sampling.hook_timeout_s)

    sampling = config.sampling
    dynamic = load("sampling.dynamic_filter_path", sampling.dynamic_filter_path)
    buffer = load("sampling.buffer_filter_path", sampling.buffer_filter_path)
    is_builtin = (sampling.dynamic_filter_path or "").startswith("rlscale.")
    if dynamic is None or not is_builtin:
        return GroupFilters(dynamic=dynamic, buffer=buffer)
    # The built-in ones take microseconds.
    function = dynamic.function
    algo = config.algo
    if algo.advantage_estimator == AdvantageEstimator.gdpo and algo.custom_advantage_function_path is None:
        function = by_named_rewards(function)
    return GroupFilters(dynamic=function, buffer=buffer)


def build_hooks(prepared: PreparedRun) -> RolloutHooks:
    """The user functions between generation and training."""
    config = prepared.config
    args = _args(prepared)

    def load(key: str) -> UserHook | None:
        path: str | None = attrgetter(key)(config)
        if path is None:
            return None
        function = load_plugin(key, path, args=args, custom=config.custom)
        return UserHook(key=key, function=function, timeout_s=config.sampling.hook_timeout_s)

    # Supervised training and replayed rollouts generate nothing; only rewards and batches of the latter are theirs.
    generates = uses_engines(config) and config.algo.loss_type != LossType.sft_loss
    compares = compares_policies(config.algo)
    return RolloutHooks(
        sample_filter=load("sampling.sample_filter_path") if generates else None,
        all_samples=load("sampling.all_samples_process_path") if generates else None,
        post_process=load("reward.post_process_path") if compares else None,
        convert=load("train.convert_samples_path") if compares else None,
        rollout_log=load("sampling.custom_rollout_log_function_path") if generates else None,
        eval_log=load("eval.custom_log_function_path") if config.eval.interval is not None else None,
    )


def build_user_rollout(prepared: PreparedRun, pool: EnginePool | None) -> UserRollout | None:
    """The rollout function of the user; None: the built-in loop collects rollouts."""
    config = prepared.config
    hook = _load_whole(prepared, "rollout.function_path")
    if hook is None or pool is None or prepared.sft is not None or prepared.replay is not None:
        return None
    params = sampling_params(config.rollout, routes=prepared.routes)
    sessions = SessionFactory(pool, params, purpose="rollout", config=config, tokenizer=prepared.tokenizer)
    return UserRollout(hook=hook, sessions=sessions, num_groups=config.batch.rollout_batch_size)


def _build_user_evaluator(prepared: PreparedRun, pool: EnginePool, hook: UserHook) -> UserEvaluator:
    config = prepared.config
    sessions = SessionFactory(
        pool,
        eval_params(config.eval, config.rollout),
        purpose="eval-function",
        config=config,
        tokenizer=prepared.tokenizer,
    )
    spans = config.eval.max_weight_versions != 1
    return UserEvaluator(hook, lambda versions: sessions.open(0, versions), spans_versions=spans)


def _load_whole(prepared: PreparedRun, key: str) -> UserHook | None:
    config = prepared.config
    path: str | None = attrgetter(key)(config)
    if path is None:
        return None
    function = load_plugin(key, path, args=_args(prepared), custom=config.custom)
    timeout_key = "rollout.function_timeout_s"
    return UserHook(key=key, function=function, timeout_s=config.rollout.function_timeout_s, timeout_key=timeout_key)


def build_evaluator(
    prepared: PreparedRun,
    pool: EnginePool | None,
    rewards: OpenRewards | None,
    *,
    trainers: Trainers | None = None,
    files: EvaluationFiles | None = None,
    generators: Generators | None = None,
) -> Evaluator | UserEvaluator | None:
    """Evaluates `eval.prompt_data` or `eval.config`; None: the run has no evaluation sets.

    Args:
        trainers: measure the loss of labels, too. None: there are none.
        files: of the samples. None: they are not kept.
        generators: as of `build_source`.
    """
    hook = _load_whole(prepared, "eval.function_path")
    if hook is not None and pool is not None and prepared.config.eval.interval is not None:
        return _build_user_evaluator(prepared, pool, hook)
    if not prepared.eval_sets:
        return None
    assert pool is not None and rewards is not None, "evaluation needs engines"
    held_out = None if trainers is None else _build_held_out_loss(prepared, pool, trainers)
    config, tokenizer = prepared.config, prepared.tokenizer

    def sessions(of: EvalSet) -> SessionFactory:
        return SessionFactory(pool, of.params, purpose=f"eval-{of.name}", config=config, tokenizer=tokenizer)

    evaluator = Evaluator(
        sets=prepared.eval_sets,
        sessions=sessions,
        rewards=lambda each: rewards.of_set(each.name),
        config=config,
        held_out=held_out,
        generate=lambda each: None if generators is None else generators.find(each.generate_path),
    )
    if files is not None:
        evaluator.keep_samples(files)
    if config.debug.save_rollout_data is not None:
        evaluator.set_dump(RolloutDump(config.debug.save_rollout_data).write_evaluation)
    hooks = build_hooks(prepared)
    if hooks.eval_log is not None:
        evaluator.set_log(hooks.evaluated)
    return evaluator


def _build_held_out_loss(prepared: PreparedRun, pool: EnginePool, trainers: Trainers) -> HeldOutLoss:
    """The loss of `eval.num_batches` batches of each set; without sets where training is not supervised."""
    loop, tokenizer = build_loop_config(prepared), prepared.tokenizer
    sets = {
        name: LabelledSet.from_groups(
            [labelled_group(i, prompt, tokenizer, version=0) for i, prompt in enumerate(prompts)],
            prepared.config.batch,
            num_ranks=loop.num_ranks,
            context_ranks=loop.context_ranks,
            cost=loop.forward_cost,
            shares_prefixes=loop.shares_prefixes,
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
    _, num_further = further_engines(config, prepared.layout)  # they may be on other nodes
    return WorldSpec(
        world_size=prepared.layout.num_trainers,
        backend=config.cluster.distributed_backend,
        timeout_s=60.0 * config.cluster.distributed_timeout_minutes,
        single_node=bundles.num_nodes == 1
        and not num_further
        and are_local(config.rollout.external_engine_addrs or []),
        channel=_build_channel_spec(prepared, run_folder=run_folder),
    )


def _build_channel_spec(prepared: PreparedRun, *, run_folder: Path) -> ChannelSpec:
    config = prepared.config
    name = config.train.weight_channel
    assert name is not None, "set by the resolve step"
    return ChannelSpec(
        name=name,
        backend=config.cluster.distributed_backend,
        device=config.cluster.device,
        bucket_bytes=config.train.update_weight_buffer_size,
        timeout_s=60.0 * config.cluster.distributed_timeout_minutes,
        folder=Path(config.train.weight_folder or run_folder / "weights").absolute(),
        model_folder=Path(prepared.model_path),
        num_adapters=config.rollout.max_staleness + 1,
        shares_base=prepared.shared_engines is not None,
        pause_mode=config.rollout.pause_mode,
        precision=config.rollout.weight_precision,
    )
