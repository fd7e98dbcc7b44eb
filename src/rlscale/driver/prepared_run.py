"""Everything a run needs that is not a process, read from its resolved config: data, reward, sizes, layout."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlscale.agents.image_parameters import find_wrong_row
from rlscale.agents.load_tools import load_tools
from rlscale.architectures.architecture import REQUIRED_FIELDS, Architecture, ForwardCost
from rlscale.config import LossType, RewardConfig, RewardType, RunConfig, prompts_name
from rlscale.config.resolve.eval_sets import eval_sets
from rlscale.config.rules import asks_teachers, has_reward_engines, only_evaluates, scores_samples, uses_engines
from rlscale.data.prompts import FilePromptSource
from rlscale.data.source import NoPrompts, build_prompt_source
from rlscale.driver.open_teachers import find_other_tokenizers
from rlscale.driver.substitutes import Substitutes
from rlscale.errors import ConfigError, DataError, Problem
from rlscale.evaluation.load_sets import EvalSet, load_eval_sets
from rlscale.expert_routes import RouteShape
from rlscale.models.hf_models import load_hf_fields, load_tokenizer
from rlscale.observe.evaluation_files import Measured
from rlscale.plan.placement import Layout, build_layout, engine_layout
from rlscale.plugins.args_view import Args
from rlscale.protocols import PromptSource, RolloutSource
from rlscale.rewards import RunReward, find_row_types, needs_no_process, prepare_reward, wrap_reward
from rlscale.rollout.replay import ReplayedRollouts
from rlscale.rollout.sft import SftSource
from rlscale.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A config with its data read: errors that need no process are found by now.

    `sft` is set instead of `reward` where responses come from the data; an SFT run that evaluates has both. `replay` is
    set where whole rollouts come from files.
    """

    config: RunConfig
    model_path: str
    tokenizer: PreTrainedTokenizerBase
    layout: Layout
    prompts: PromptSource
    sft: RolloutSource | None
    replay: RolloutSource | None
    reward: RunReward | None
    eval_sets: tuple[EvalSet, ...]
    num_rollouts: int
    rollouts_per_epoch: int | None  # where data.num_epoch counts the rollouts
    routes: RouteShape | None  # of the expert routes that engines return with samples
    forward_cost: ForwardCost | None  # of the policy; None: work is not balanced
    policy_cost: ForwardCost | None  # of the policy, for its MFU; None: config.json does not have the sizes
    substitutes: Substitutes | None = None  # None: no rehearsal
    measured: Measured | None = None  # origin of the weights of a run that only evaluates
    shared_engines: Layout | None = None  # of engines that other jobs of the sweep use, too; None: the run has its own

    @property
    def vocab_size(self) -> int:
        """Rows of the policy's embedding."""
        return _vocab_size(load_hf_fields(self.model_path), self.tokenizer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "decoding one list of ids gives one text"
        return text

    def with_substitutes(self, substitutes: Substitutes) -> PreparedRun:
        """The run with the parts of a rehearsal."""
        reward = None if self.reward is None else wrap_reward(self.reward, substitutes.reward)
        sets = tuple(
            each if each.reward is None else replace(each, reward=wrap_reward(each.reward, substitutes.reward))
            for each in self.eval_sets
        )
        return replace(self, reward=reward, eval_sets=sets, substitutes=substitutes)

    def with_shared_engines(self) -> PreparedRun:
        """The run as a job of a sweep whose jobs share engines: its own placement group has none."""
        return replace(self, shared_engines=engine_layout(self.layout), layout=replace(self.layout, num_engines=0))

    @property
    def held_out(self) -> dict[str, Sequence[Prompt]]:
        """Prompts of each set for the loss of supervised training on held-out labels; empty for other training."""
        num_batches = self.config.eval.num_batches
        if self.sft is None or num_batches is None:
            return {}
        max_prompts = num_batches * self.config.batch.rollout_batch_size
        return {each.name: each.prompts[:max_prompts] for each in self.eval_sets}

    @property
    def steps_per_rollout(self) -> int:
        """Optimiser steps of all passes over a rollout."""
        batch = self.config.batch
        assert batch.num_steps_per_rollout is not None, "set by the resolve step"
        return batch.num_steps_per_rollout * self.config.algo.ppo_epochs

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.num_rollouts * self.steps_per_rollout


def prepare_run(config: RunConfig, model_path: str) -> PreparedRun:
    """Reads tokenizer, prompts and reward.

    Raises:
        ConfigError, DataError: a file or function of the config cannot be used.
    """
    tokenizer = load_tokenizer(model_path)
    is_sft = config.algo.loss_type == LossType.sft_loss
    # Prompts may have any length in a run that neither generates nor learns responses.
    has_responses = is_sft or uses_engines(config)
    fields = load_hf_fields(model_path)
    if asks_teachers(config):
        problems = find_other_tokenizers(config, tokenizer, vocab_size=_vocab_size(fields, tokenizer))
        if problems:
            raise ConfigError(problems)
    positions = fields.get("max_position_embeddings") if has_responses else None
    args = Args(config, runtime={"hf_checkpoint": model_path})
    prompts: PromptSource = NoPrompts()
    if not only_evaluates(config):
        prompts = build_prompt_source(config, tokenizer, positions=positions, args=args)
    evaluated = tuple(load_eval_sets(config, tokenizer, positions=positions, args=args))
    _check_tool_images(config, prompts, evaluated)
    per_epoch, per_rollout = _rollouts_per_epoch(config, prompts), config.batch.rollout_batch_size
    return PreparedRun(
        config=config,
        model_path=model_path,
        tokenizer=tokenizer,
        layout=build_layout(config),
        prompts=prompts,
        sft=SftSource(
            prompts,
            tokenizer,
            rollout_batch_size=per_rollout,
            positions=positions,
            draw_timeout_s=config.sampling.hook_timeout_s,
        )
        if is_sft
        else None,
        replay=_open_replay(config),
        reward=_prepare_reward(config, args, prompts, evaluated) if scores_samples(config) else None,
        eval_sets=evaluated,
        num_rollouts=_num_rollouts(config, per_epoch),
        rollouts_per_epoch=per_epoch,
        routes=_route_shape(config, model_path, fields),
        forward_cost=_forward_cost(config, model_path, fields),
        policy_cost=None
        if [name for name in REQUIRED_FIELDS if name not in fields]
        else Architecture.from_fields(fields).forward_cost,
    )


def _check_tool_images(config: RunConfig, prompts: PromptSource, evaluated: Sequence[EvalSet]) -> None:
    """Raises DataError for a row that has not the images that a function of `agent.tools` takes."""
    if config.data.multimodal_keys is None or not uses_engines(config) or not config.agent.tools:
        return
    parameters = {tool.name: tool.image_parameters for tool in load_tools(config.agent.tools)}
    sets = [(each.prompts, f"evaluation set {each.name}") for each in evaluated]
    if isinstance(prompts, FilePromptSource):
        sets.append((prompts.prompts, prompts_name(config.data)))
    for rows, source in sets:
        if (wrong := find_wrong_row(rows, parameters, source=source)) is not None:
            raise DataError(wrong)


def _vocab_size(fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows of the policy's embedding; the length of the tokenizer where `config.json` does not have it."""
    return int(fields.get("vocab_size") or len(tokenizer))


def _prepare_reward(config: RunConfig, args: Args, prompts: PromptSource, evaluated: Sequence[EvalSet]) -> RunReward:
    """Checks the reward of the run, and those that rows of files name."""
    types: set[str] = set()
    if config.reward.custom_path is None and not config.reward.functions:
        if isinstance(prompts, FilePromptSource):
            types |= find_row_types(prompts.prompts, source=prompts_name(config.data))
            types |= set(config.data.reward_by_source.values())
        for each, given in zip(evaluated, eval_sets(config.eval) if evaluated else (), strict=True):
            if each.reward is None:
                types |= find_row_types(each.prompts, source=given.path)
    reward = prepare_reward(config.reward, custom=config.custom, args=args, row_types=types)
    if has_reward_engines(config) and config.reward.custom_path is None and not config.reward.functions:
        _check_judge_is_used({config.reward.type, *types, *_own_types(config, evaluated)}, config)
    if needs_no_process(reward):
        _warn_of_process_keys(config.reward)
    return reward


def _own_types(config: RunConfig, evaluated: Sequence[EvalSet]) -> set[str]:
    """The rewards of evaluation sets that have their own."""
    own = [each.own.rm_type for each in eval_sets(config.eval)] if evaluated else []
    return {str(name) for name in own if name is not None}


def _check_judge_is_used(types: Collection[str | None], config: RunConfig) -> None:
    """Raises ConfigError if neither `reward.type` nor a row names the judge, whose engines would be idle."""
    if RewardType.judge in types:
        return
    rule, fix = "be 0 without a reward that asks the engines", "set it to 0, or choose reward.type=judge"
    value = str(config.reward.engine.num_gpus)
    raise ConfigError([Problem(path="reward.engine.num_gpus", rule=rule, value=value, fix=fix)])


def _warn_of_process_keys(config: RewardConfig) -> None:
    """Warns of keys of processes that are set. Only now it is known: rows may name a reward that needs a process."""
    default = RewardConfig()
    for name in ("max_workers", "max_concurrency", "timeout_s", "max_retries"):
        if getattr(config, name) != getattr(default, name):
            _logger.warning("reward.%s is ignored: this reward needs no process", name)


def _open_replay(config: RunConfig) -> RolloutSource | None:
    template = config.debug.load_rollout_data
    if template is None:
        return None
    has_routes, has_images = config.algo.use_rollout_routing_replay, config.data.multimodal_keys is not None
    return ReplayedRollouts(template, has_routes=has_routes, has_images=has_images)


def _route_shape(config: RunConfig, model_path: str, fields: Mapping[str, Any]) -> RouteShape | None:
    """Shape of the model's expert routes; None: samples have none."""
    algo = config.algo
    if not algo.use_rollout_routing_replay or algo.loss_type == LossType.sft_loss or config.debug.rollout_only:
        return None
    sizes = [fields.get(name) for name in ("num_layers", "num_experts_per_tok", "num_experts")]
    if None in sizes:
        rule, fix = "be false with a model that has no experts", f"remove it, or check {model_path}/config.json"
        raise ConfigError([Problem(path="algo.use_rollout_routing_replay", rule=rule, value="true", fix=fix)])
    layers, chosen, experts = (int(size) for size in sizes if size is not None)
    return RouteShape(num_layers=layers, num_chosen=chosen, num_experts=experts)


def _forward_cost(config: RunConfig, model_path: str, fields: Mapping[str, Any]) -> ForwardCost | None:
    """Operations of the model, for `batch.balance_data`; None: it is false."""
    if not config.batch.balance_data:
        return None
    missing = [name for name in REQUIRED_FIELDS if name not in fields]
    if not missing:
        return Architecture.from_fields(fields).forward_cost
    fix = f"{model_path}/config.json lacks {', '.join(missing)}, which the estimate of FLOPs needs"
    raise ConfigError([Problem(path="batch.balance_data", rule="be false with this model", value="true", fix=fix)])


def _rollouts_per_epoch(config: RunConfig, prompts: PromptSource) -> int | None:
    """None: `data.num_rollout` is set, which takes precedence over `data.num_epoch`."""
    if config.data.num_rollout is not None:
        return None
    num_prompts = len(prompts)
    per_epoch = num_prompts // config.batch.rollout_batch_size
    if per_epoch > 0:
        return per_epoch
    raise ConfigError(
        [
            Problem(
                path="batch.rollout_batch_size",
                rule=f"be at most the number of prompts ({num_prompts}) when data.num_epoch counts the rollouts",
                value=str(config.batch.rollout_batch_size),
                fix="lower it, or set data.num_rollout",
            )
        ]
    )


def _num_rollouts(config: RunConfig, per_epoch: int | None) -> int:
    if per_epoch is None:
        assert config.data.num_rollout is not None, "a run that counts no epochs has data.num_rollout"
        return config.data.num_rollout
    assert config.data.num_epoch is not None, "a rule requires num_rollout or num_epoch"
    return per_epoch * config.data.num_epoch
