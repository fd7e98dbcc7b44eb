"""Protocols between the packages of rlscale.

    PromptSource ─ prompts ─> RolloutSource ─ groups ─> TrainBatch ─> Trainers ─ (one TrainBackend a rank)
                                 │    ▲                                  │
                              Reward  Engine <─ WeightReceiver ═ weights ═ WeightChannel

`rollout`, `engines`, `training`, `weights` and `checkpoint` do not import each other; they share these protocols only.
`control` calls the asynchronous protocols; a worker process implements the synchronous ones, called on every rank.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rlscale.types import (
    EngineAddress,
    Generation,
    Group,
    Prompt,
    RolloutColumns,
    Sample,
    SamplingParams,
    StepPlan,
    StepSamples,
    TokenColumns,
    TrainBatch,
    TrainResult,
    WeightBucket,
    WeightGroup,
    WeightSyncReport,
    WeightVersion,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rlscale.config import MegatronConfig

Metrics = Mapping[str, float]


class PromptSource(Protocol):
    """Source of prompts in a reproducible order, with a position that can be saved."""

    def __len__(self) -> int:
        """Number of prompts in one epoch."""
        ...

    def take(self, num_prompts: int) -> list[Prompt]:
        """Returns the next prompts; continues with the next epoch at the end of one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position from `state_dict`."""
        ...


@runtime_checkable
class Reward(Protocol):
    """Scores one finished sample. A plain or an async function; runs off the event loop.

    With `reward.key` it returns several numbers by name: that one is trained on, the others are metrics. A parameter
    `custom` receives the config's node of that name.

    Raises: anything; the run then stops and names the sample (a failure never becomes a zero reward).
    """

    def __call__(self, sample: Sample) -> float | Mapping[str, float]: ...


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


class AdvantageFunction(Protocol):
    """`algo.custom_advantage_function_path`: rewards to advantages. Runs on every rank, on the whole rollout.

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


class Engine(Protocol):
    """Client of one inference engine over SGLang's HTTP API.

    Every method raises EngineError, naming the engine, if the engine rejects the request or cannot be reached.
    """

    @property
    def address(self) -> EngineAddress: ...

    async def health(self, *, timeout_s: float = 5.0) -> bool:
        """Returns True if the engine responds within the time; never raises."""
        ...

    async def info(self) -> dict[str, Any]:
        """Merges `/model_info` and `/server_info`; has at least `weight_version` (int) and `vocab_size` (int)."""
        ...

    async def weight_version(self) -> WeightVersion:
        """Version of the engine's weights; a part of `info` that is cheap to request."""
        ...

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, n: int = 1, rid: str | None = None
    ) -> list[Generation]:
        """Generates `n` responses to one prompt. Sample j of n uses `sampling_seed + j`."""
        ...

    def stream(
        self, input_ids: Sequence[int], params: SamplingParams, *, rid: str | None = None
    ) -> AsyncIterator[Generation]:
        """Streams a response: each item is cumulative, the last one has a finish reason.

        Closing the iterator aborts the request.
        """
        ...

    async def abort(self, rid: str | None = None) -> None:
        """Aborts one request, or all; their callers get partial responses with finish reason `abort`."""
        ...

    async def pause(self, mode: str = "retract") -> None:
        """Stops decoding until `resume`; new requests wait.

        `abort` ends running requests with partial responses; `retract` queues them again and recomputes their KV cache
        on resume; `in_place` keeps them with their KV cache, so that an update of the weights must not flush it.
        """
        ...

    async def resume(self) -> None: ...

    async def flush_cache(self) -> None: ...

    async def release_memory(self, tags: Collection[str] = ()) -> None:
        """Frees `weights`, `kv_cache` or (no tags) both. No request may run; pause first."""
        ...

    async def resume_memory(self, tags: Collection[str] = ()) -> None:
        """Allocates the memory again. The weights are undefined until all of them have been sent."""
        ...

    async def join_weight_group(self, group: WeightGroup, rank_offset: int) -> None: ...

    async def leave_weight_group(self, name: str) -> None: ...

    async def begin_weight_update(self) -> None: ...

    async def receive_bucket(self, bucket: WeightBucket, *, group_name: str, version: WeightVersion) -> None:
        """Receives one bucket of a broadcast. Raises WeightSyncError naming a tensor whose checksum differs."""
        ...

    async def end_weight_update(self, version: WeightVersion) -> None: ...

    async def update_from_tensor(self, payloads: Sequence[str], *, load_format: str | None) -> None:
        """Loads weights from shared memory of this machine, one payload per rank of the engine.

        Raises WeightSyncError naming a tensor whose checksum differs.
        """
        ...

    async def update_from_disk(
        self, folder: Path, *, version: WeightVersion, checksums: Mapping[str, str], load_format: str | None = None
    ) -> None:
        """Loads all weights from a folder that the engine can read, as `version`. Needs no begin and end.

        Raises WeightSyncError naming a tensor whose checksum differs.
        """
        ...

    async def checksums(self) -> dict[str, str]:
        """Checksum of every weight of the engine, by Hugging Face name."""
        ...

    async def close(self) -> None: ...


class WeightReceiver(Protocol):
    """Engine side of weight sync, inside the engine process."""

    @property
    def formats(self) -> list[str]:
        """Load formats that it reads in addition to SGLang's own."""
        ...

    def join(self, group: WeightGroup, rank: int) -> None: ...

    def open_bucket(self, bucket: WeightBucket, group_name: str) -> IncomingWeights:
        """Joins the broadcast of one bucket. Raises WeightSyncError for a group that it has not joined."""
        ...

    def leave(self, name: str) -> None: ...

    def open_tensors(self, payload: str, load_format: str) -> IncomingWeights:
        """Opens one entry of `serialized_named_tensors`. Raises ValueError if it cannot be read."""
        ...

    def open_folder(
        self, folder: Path, *, load_format: str | None, version: WeightVersion | None, checksums: Mapping[str, str]
    ) -> IncomingWeights:
        """Opens a folder of weights. Raises ValueError if it has none, WeightSyncError naming a damaged file."""
        ...


class IncomingWeights(Protocol):
    """Weights that an engine has been notified of and has not read yet."""

    @property
    def layout(self) -> WeightBucket:
        """Names, types and shapes; checksums only if known beforehand."""
        ...

    def write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        """Reads each tensor, verifies it and writes it into its target (in the target's dtype); returns checksums.

        Without targets it only verifies. Raises WeightSyncError naming the tensor; targets may then be partly written.
        """
        ...


class WeightChannel(Protocol):
    """Trainer side of weight sync: sends weights to all engines and verifies them. Called on every trainer rank."""

    def connect(self, engines: Sequence[EngineAddress]) -> None: ...

    def push(self, weights: Iterator[tuple[str, Tensor]], version: WeightVersion) -> WeightSyncReport:
        """Sends all weights (Hugging Face names, full tensors) and then the version.

        Raises WeightSyncError, naming the tensor or the engine, if an engine has other weights afterwards.
        """
        ...

    def close(self) -> None: ...


class TrainBackend(Protocol):
    """One trainer rank, a plain SPMD object: every method is called on every rank with the same arguments."""

    def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        """Computes advantages and loss, and makes one optimiser step per plan."""
        ...

    @property
    def senders(self) -> Sequence[int]:
        """The ranks that send the weights to the engines; each weight is on exactly one of them."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields full parameters by Hugging Face name, in a fixed order (a collective).

        Each is yielded on one of the `senders`; other ranks may get none. A tensor may share memory with the model: it
        is valid until the next call of any method.
        """
        ...

    def offload(self) -> None:
        """Moves the models off the device, where engines share it, until the next call.

        Every other method but `weights` ends with it.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes model, optimiser, schedule and random states of all ranks into an existing folder (a collective).

        With `megatron.async_save` it may return earlier, once training can continue: see `finish_saving`.
        """
        ...

    def finish_saving(self) -> None:
        """Waits until every save is on disk. Not a collective; may run concurrently with any other method."""
        ...

    def load(self, folder: Path) -> None:
        """Inverse of `save`; the number of ranks may differ (random states are then seeded again)."""
        ...

    def export_hf(self, folder: Path) -> None:
        """Writes a folder that `transformers` can load (a collective)."""
        ...

    def close(self) -> None: ...


class Trainers(Protocol):
    """All trainer ranks, as seen by the controller."""

    async def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult: ...

    async def eval_loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        """Mean of -logprob over the trainable tokens of all steps; updates nothing."""
        ...

    async def connect(self, engines: Sequence[EngineAddress]) -> None: ...

    async def sync_weights(self, version: WeightVersion) -> WeightSyncReport: ...

    async def save(self, folder: Path) -> None: ...

    async def finish_saving(self) -> None:
        """Waits until every save is on disk, which may be later than `save` (`megatron.async_save`)."""
        ...

    async def load(self, folder: Path) -> None: ...

    async def export_hf(self, folder: Path) -> None: ...


class RolloutSource(Protocol):
    """Source of prompts by rollout and of finished groups: generated and rewarded, or read from data (SFT)."""

    @property
    def has_rewards(self) -> bool:
        """True if the samples have rewards."""
        ...

    def next_prompts(self, rollout_id: int) -> list[tuple[int, Prompt]]:
        """Returns the prompts of the next rollout, each with the index of its group, and advances the position."""
        ...

    async def group(self, index: int, prompt: Prompt, *, oldest: WeightVersion, newest: WeightVersion | None) -> Group:
        """Generates one group. Samples that an engine aborted are included, without reward.

        Args:
            index: index of the group, from `next_prompts`.
            prompt: its prompt, from `next_prompts`.
            oldest: oldest version that the engines may have; a token of an older one is an error of the engine.
            newest: newest version that they may have; None: weights may be updated during generation.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as JSON values: the next result of `next_prompts`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position from `state_dict`."""
        ...


class MetricSink(Protocol):
    """Destination of all metrics of a run."""

    def log(self, metrics: Metrics, *, step: int) -> None: ...

    def rewind(self, step: int) -> None:
        """Deletes what was logged at this step and later: the run resumed from a checkpoint and logs it again."""
        ...

    def close(self) -> None: ...
