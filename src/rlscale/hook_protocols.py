"""Protocols of the functions that a user names by dotted path. `plugins` adapts functions in slime's form to them.

A function gets the types of rlscale and no config; a parameter `custom` of any of them receives the config's node of
that name. `Reward` and `PromptSource`, which rlscale implements too, are in `protocols`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlscale.trajectory import Trajectory
from rlscale.types import (
    Generation,
    Group,
    RolloutColumns,
    SamplingParams,
    StepSamples,
    TokenColumns,
    TrainBatch,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rlscale.config import MegatronConfig, RunConfig


class FrozenModelClient(Protocol):
    """A model of `sglang.config` whose weights stay as they are. A request waits while its engine restarts."""

    async def generate(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        **sampling_params: Any,
    ) -> str:
        """The text that the model generates for a text, or for messages with `role` and `content`.

        Raises an error when an engine refuses the request.
        """
        ...

    async def score(self, texts: Sequence[str]) -> list[float]:
        """The numbers that a reward model (`is_embedding`) gives texts. Raises as `generate`."""
        ...

    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a request of SGLang's API, e.g. `/generate`. Raises as `generate`."""
        ...


class GenerationSession(Protocol):
    """Requests of a generate function for its trajectory. They may be concurrent."""

    @property
    def params(self) -> SamplingParams:
        """Sampling of the run; the seed is that of the trajectory."""
        ...

    @property
    def config(self) -> RunConfig | None: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def is_evaluation(self) -> bool:
        """Whether the trajectory is part of an evaluation."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether the rollout has ended: requests are answered with the finish reason `abort` from now on."""
        ...

    def model(self, name: str) -> FrozenModelClient:
        """A further model of `sglang.config`. Its requests, or this call, raise an error if there is none."""
        ...

    async def generate(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> Generation:
        """One answer of an engine. Its finish reason is `length` if `token_ids` fill `rollout.max_context_len`.

        Raises:
            EngineError: no engine answered; leave it to the loop, which starts the trajectory again.
        """
        ...


class GenerateFunction(Protocol):
    """`sampling.custom_generate_function_path`: generates one trajectory. A coroutine, or a plain function.

    It adds turns to `trajectory` and leaves it with a status: `add_generation` sets both. Branches are samples. After
    an answer with the finish reason `abort` it returns; with `sampling.partial_rollout` it is called again with the
    turns so far. An exception is a failure of this trajectory, which starts again. It runs in a separate process
    (`sampling.generate_isolation`), within `sampling.generate_timeout_s`.
    """

    def __call__(self, trajectory: Trajectory, session: GenerationSession, /) -> Awaitable[None] | None: ...


class RolloutSession(Protocol):
    """Prompts, requests and the loop's generation, for a rollout function."""

    metrics: dict[str, float]  # logged with those of the rollout

    @property
    def num_groups(self) -> int:
        """Number of groups to return: `batch.rollout_batch_size`."""
        ...

    @property
    def session(self) -> GenerationSession:
        """Requests to the engines. With `rollout.max_staleness`, weights may be updated between them."""
        ...

    def draw(self, number: int) -> list[Group]:
        """The next groups, those of the buffer first. New ones have no samples."""
        ...

    def requeue(self, groups: Sequence[Group]) -> None:
        """Leaves groups to a later rollout."""
        ...

    async def generate(self, group: Group) -> Group:
        """Generates and grades a group as the loop does, retries included; `Group.failed` has what failed."""
        ...


class RolloutFunction(Protocol):
    """`rollout.function_path`: generates a whole rollout. It replaces prompts in flight, over-sampling and filters.

    It runs in a separate thread within `rollout.function_timeout_s`, plain or as a coroutine. A failure ends the run; a
    checkpoint has the groups that are drawn and not trained, which the resumed run draws again.

    Returns:
        `context.num_groups` groups that it drew, each once, whose samples are graded. Groups that it neither returns
        nor puts back are dropped, and the ledger says so.
    """

    def __call__(self, rollout_id: int, context: RolloutSession, /) -> Sequence[Group] | Awaitable[Sequence[Group]]: ...


class EvalFunction(Protocol):
    """`eval.function_path`: evaluates the weights that the engines hold, on prompts that it reads itself.

    `context` has `session` and `metrics`. Training of later rollouts waits for it as for the built-in evaluation.

    Returns:
        The rewards of each set, by its name.
    """

    def __call__(
        self, rollout_id: int, context: Any, /
    ) -> Mapping[str, Sequence[float]] | Awaitable[Mapping[str, Sequence[float]]]: ...


class DynamicFilter(Protocol):
    """`sampling.dynamic_filter_path`: keeps or drops a finished group, as soon as its last sample has a reward.

    Returns:
        True keeps the group. False drops it, and the report counts it under the function's name; a str drops it and is
        the name.
    """

    def __call__(self, group: Group, /) -> bool | str: ...


class BufferFilter(Protocol):
    """`sampling.buffer_filter_path`: selects the groups of the buffer that a rollout continues.

    The buffer holds groups of earlier rollouts, in the order of their prompts: aborted ones, whose samples have the
    tokens so far; finished ones that were not needed; and those that were not started, which have no samples.

    Returns:
        Groups of `buffer`, at most `num_groups`. The others stay in the buffer.
    """

    def __call__(self, buffer: Sequence[Group], num_groups: int, /) -> Sequence[Group]: ...


class SampleFilter(Protocol):
    """`sampling.sample_filter_path`: called with the groups of a rollout once it is complete, before training.

    It may set the loss mask of a sample to zeros: no token of the sample is trained, and its reward still counts in its
    group.
    """

    def __call__(self, groups: Sequence[Group], /) -> None: ...


class AllSamplesHook(Protocol):
    """`sampling.all_samples_process_path`: called with all groups of a rollout, dropped ones included."""

    def __call__(self, groups: Sequence[Group], /) -> None: ...


class Judge(FrozenModelClient, Protocol):
    """The model of `reward.engine`: what a reward with a parameter `judge` gets. Write the reward as a coroutine.

    An error of a request should pass: the sample is scored again. `reward.timeout_s` limits the whole call of the
    reward.

    Example:
        async def score(sample, judge):
            question = f"Is this polite? Answer yes or no: {sample.response}"
            answer = await judge.generate([{"role": "user", "content": question}], max_new_tokens=8)
            return float("yes" in answer.lower())
    """

    def model(self, name: str) -> FrozenModelClient:
        """A further model of `sglang.config`. Its requests, or this call, raise an error if there is none."""
        ...


class RewardPostProcess(Protocol):
    """`reward.post_process_path`: rewards of a rollout as used for advantages. Replaces the normalisation per group.

    rloo and gdpo still compare them within a group. They have no names: gdpo normalises them as one. Metrics and
    samples keep the rewards as graded.

    Returns:
        One finite number for each sample, in the order of groups and of the samples in them.
    """

    def __call__(self, groups: Sequence[Group], /) -> Sequence[float]: ...


class BatchConversion(Protocol):
    """`train.convert_samples_path`: changes the batch of a rollout right before it goes to the trainers.

    Args:
        groups: the groups of the rollout.
        batch: of their samples, in the order of groups and of the samples in them.

    Returns:
        `batch`, or another one (`dataclasses.replace`) with a row for each sample, in the same order, of the same
        groups and trajectories. Every column may change, and the length of a sample, too.
    """

    def __call__(self, groups: Sequence[Group], batch: TrainBatch, /) -> TrainBatch: ...


class RolloutLogFunction(Protocol):
    """`sampling.custom_rollout_log_function_path`: logs the samples of a rollout.

    Args:
        rollout_id: number of the rollout.
        groups: those that are trained.
        metrics: the built-in metrics of the rollout, which it may change.

    Returns:
        True: only metrics that it added or changed are logged. None and False: all are.
    """

    def __call__(self, rollout_id: int, groups: Sequence[Group], metrics: dict[str, float], /) -> bool | None: ...


class EvalLogFunction(Protocol):
    """`eval.custom_log_function_path`: logs an evaluation.

    Args:
        rollout_id: number of rollouts before the evaluation.
        groups: the groups of each evaluation set, by its name.
        metrics: the built-in metrics of the evaluation, which it may change.

    Returns:
        True: only metrics that it added or changed are logged. None and False: all are.
    """

    def __call__(
        self, rollout_id: int, groups: Mapping[str, Sequence[Group]], metrics: dict[str, float], /
    ) -> bool | None: ...


class LossFunction(Protocol):
    """`algo.custom_loss_function_path`: a loss that replaces `policy_loss`. Called by position.

    A parameter `custom`, here and in the four functions below, receives the config's node of that name.

    Returns the loss at every token; the trainer reduces it to the loss of the step, so that the result does not depend
    on micro-batches and ranks. Values where the mask is false are ignored.

    Args:
        logprobs: of the policy, with gradient. [T]
        tokens: the other columns of the tokens.

    Returns:
        The loss at each token [T], and {metric: (sum, count)}: the same names in every micro-batch.
    """

    def __call__(
        self, logprobs: Tensor, tokens: TokenColumns, /
    ) -> tuple[Tensor, Mapping[str, tuple[Tensor, Tensor]]]: ...


class LogitsLossFunction(Protocol):
    """A `LossFunction` that also reads the logits of the policy: it has a parameter `logits`. Called by position.

    Args:
        logprobs: of the policy, with gradient. [T]
        tokens: the other columns of the tokens.
        logits: of the positions that predict the tokens, with gradient, divided by `rollout.temperature`; float32.
            [T, V], V without padding rows. log_softmax of them gives `logprobs` and, summed, `tokens.entropy`.

    Returns: as `LossFunction`.
    """

    def __call__(
        self, logprobs: Tensor, tokens: TokenColumns, /, logits: Tensor
    ) -> tuple[Tensor, Mapping[str, tuple[Tensor, Tensor]]]: ...


class AdvantageFunction(Protocol):
    """`algo.custom_advantage_function_path`: rewards to advantages. Runs on every rank, on the whole rollout.

    A trajectory of several samples is passed as one: it has one reward and counts once in its group.
    `tokens.old_logprobs` and `tokens.ref_logprobs` are set if the run makes those passes (`train.reuse_logprobs=false`,
    `algo.use_kl_loss`). Must be deterministic, since every rank computes it separately.

    Returns:
        The advantage at each token. [T]
    """

    def __call__(self, rollout: RolloutColumns, /) -> Tensor: ...


class WeightFunction(Protocol):
    """`algo.custom_tis_function_path`: weights of the policy loss, from `tokens.old_logprobs` and `rollout_logprobs`.

    A weight of 0 masks a token: the denominators of the loss stay. No gradient flows through the weights.

    Returns:
        The weight of each token [T], and {metric: (sum, count)}: the same names in every micro-batch.
    """

    def __call__(self, tokens: TokenColumns, /) -> tuple[Tensor, Mapping[str, tuple[Tensor, Tensor]]]: ...


class ReducerFunction(Protocol):
    """`algo.custom_reducer_function_path`: weight of each sample's tokens in the loss of an optimiser step.

    The loss of the step is the sum over its samples of weight * (sum of the sample's losses by token), KL loss and
    entropy bonus included. So the weights contain the denominators, and the result does not depend on micro-batches and
    ranks. Must be deterministic, since every rank computes it separately. It does not apply to the loss of a critic.

    Returns:
        The weight of each sample, finite. [S]
    """

    def __call__(self, step: StepSamples, /) -> Tensor: ...


class PostprocessFunction(Protocol):
    """`train.rollout_data_postprocess_path`: changes the columns of a rollout right before training.

    Called once per rollout on every rank, after advantages, with the samples that this rank trains on (maybe none). The
    result replaces `old_logprobs`, `rollout_logprobs`, `ref_logprobs` and `advantages`. Mask and sample ids must stay,
    since the denominators depend on them, and None must stay None: to remove a token from the policy loss, set its
    advantage to 0.

    Returns:
        The columns to train with, and {metric: (sum, count)}: the same names on every rank.
    """

    def __call__(self, rollout: RolloutColumns, /) -> tuple[TokenColumns, Mapping[str, tuple[Tensor, Tensor]]]: ...


class MegatronInit(Protocol):
    """`megatron.init_hook_path`: called once on each rank, after Megatron-core's groups and before any model is built.

    Args:
        megatron: the config group, resolved.
    """

    def __call__(self, megatron: MegatronConfig, /) -> None: ...


class BeforeLogprobs(Protocol):
    """`megatron.before_log_prob_hook_path`: called on each rank before each forward pass without gradient.

    Args:
        model: the pipeline chunks of this rank, with the weights of the pass.
        role: owner of these weights: `policy`, `old_policy`, `reference`, `teacher` or `critic`.
    """

    def __call__(self, model: Sequence[Any], role: str, /) -> None: ...


class BeforeTrainStep(Protocol):
    """`megatron.before_train_step_hook_path`: called on each rank before each optimiser step, gradients still unset.

    Args:
        rollout_id: the rollout that is trained on.
        step_id: optimiser steps done so far.
        model: the pipeline chunks of this rank, wrapped in their gradient buffers; of the policy or of the critic.
        optimizer: Megatron-core's, of these chunks.
    """

    def __call__(self, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, /) -> None: ...


class ModelProvider(Protocol):
    """`model.custom_model_provider_path`: builds one pipeline chunk of a model of Megatron-core.

    Called for policy and critic. Weights are loaded afterwards, by their names.

    Args:
        build: builds the default chunk; keyword arguments override those that it passes (`build.arguments`) to its
            class, a subclass of GPTModel (`build.kind`).
        pre_process: the chunk has the embedding.
        post_process: the chunk has the final norm, and the output layer or value head.
        vp_stage: index of the chunk on this rank, with an interleaved pipeline.

    Returns:
        An object of `build.kind` or of a subclass of it.
    """

    def __call__(self, build: Any, pre_process: bool, post_process: bool, vp_stage: int | None, /) -> Any: ...
