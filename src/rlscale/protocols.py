"""Every seam of rlscale on one page.

    PromptSource ─ prompts ─> RolloutSource ─ groups ─> TrainBatch ─> Trainers ─ (one TrainBackend a rank)
                                 │    ▲                                  │
                              Reward  Engine <─ WeightReceiver ═ weights ═ WeightChannel

Parts meet here and nowhere else: `rollout`, `engines`, `training`, `weights` and `checkpoint` do not import each other.
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
    """Prompts in a reproducible order, with a position that can be saved."""

    def __len__(self) -> int:
        """Prompts in one epoch."""
        ...

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; goes on into the next epoch where one ends."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position from `state_dict`."""
        ...


@runtime_checkable
class Reward(Protocol):
    """Scores one finished sample. May be a plain or an async function; runs off the event loop.

    With `reward.key` it gives several numbers by name, of which that one is trained on and the others are metrics. A
    parameter `custom` is filled with the config's node of that name.

    Raises: anything; the run then stops and names the sample (a failure never becomes a zero reward).
    """

    def __call__(self, sample: Sample) -> float | Mapping[str, float]: ...


class LossFunction(Protocol):
    """`algo.custom_loss_function_path`: a loss that takes the place of `policy_loss`. Called by position.

    A parameter `custom`, here and in the four functions below, is filled with the config's node of that name.

    Gives the loss at every token, of which the trainer makes the loss of the step, so that no cut into micro-batches
    and ranks can change it. What it gives where the mask is false is not used.

    Args:
        lp: logprobs of the policy, with gradient. [T]
        tokens: what else is known of the tokens.

    Returns:
        The loss at each token [T], and {metric: (sum, count)}: the same names in every micro-batch.
    """

    def __call__(self, lp: Tensor, tokens: TokenColumns, /) -> tuple[Tensor, Mapping[str, tuple[Tensor, Tensor]]]: ...


class AdvantageFunction(Protocol):
    """`algo.custom_advantage_function_path`: rewards to advantages. Runs on every rank, on the whole rollout.

    `tokens.old_logprobs` and `tokens.ref_logprobs` are there where the run makes those passes
    (`train.reuse_logprobs=false`, `algo.use_kl_loss`). Must be deterministic, as every rank computes it for itself.

    Returns:
        The advantage at each token. [T]
    """

    def __call__(self, rollout: RolloutColumns, /) -> Tensor: ...


class WeightFunction(Protocol):
    """`algo.custom_tis_function_path`: factors of the policy loss, from both columns of logprobs.

    Masking a token means a factor of 0: the denominators of the loss stay. No gradient flows through the factors.

    Returns:
        The factor of each token [T], and {metric: (sum, count)}: the same names in every micro-batch.
    """

    def __call__(self, tokens: TokenColumns, /) -> tuple[Tensor, Mapping[str, tuple[Tensor, Tensor]]]: ...


class ReducerFunction(Protocol):
    """`algo.custom_reducer_function_path`: what a token of each sample weighs in the loss of an optimiser step.

    The loss of the step is the sum over its samples of weight * (sum of the sample's losses by token), KL loss and
    entropy bonus included. So the weights hold the denominators, and no cut into micro-batches and ranks can change the
    result. Must be deterministic, as every rank computes it for itself. The loss of a critic is averaged as without it.

    Returns:
        The weight of each sample, finite. [S]
    """

    def __call__(self, step: StepSamples, /) -> Tensor: ...


class PostprocessFunction(Protocol):
    """`train.rollout_data_postprocess_path`: a last look at a rollout before training, and a chance to change it.

    Called once a rollout on every rank, after advantages, with the samples that this rank trains on (maybe none). What
    it gives takes the place of `old`, `gen`, `ref` and `advantages`; mask and sample ids stay, since denominators
    were made of them, and so does a None: to take a token out of the policy loss, give it the advantage 0.

    Returns:
        The columns to train with, and {metric: (sum, count)}: the same names on every rank.
    """

    def __call__(self, rollout: RolloutColumns, /) -> tuple[TokenColumns, Mapping[str, tuple[Tensor, Tensor]]]: ...


class MegatronInit(Protocol):
    """`megatron.init_hook_path`: called once on each rank, when Megatron-core has its groups and no model is made yet.

    Args:
        megatron: the config group, resolved.
    """

    def __call__(self, megatron: MegatronConfig, /) -> None: ...


class BeforeLogprobs(Protocol):
    """`megatron.before_log_prob_hook_path`: called on each rank before each forward pass without gradient.

    Args:
        model: the pipeline chunks of this rank, holding the weights that the pass computes with.
        role: whose weights those are: `policy`, `old_policy`, `reference`, `teacher` or `critic`.
    """

    def __call__(self, model: Sequence[Any], role: str, /) -> None: ...


class BeforeTrainStep(Protocol):
    """`megatron.before_train_step_hook_path`: called on each rank before each optimiser step, gradients still unset.

    Args:
        rollout_id: of the rollout that is trained on.
        step_id: optimiser steps that the model has made.
        model: the pipeline chunks of this rank in their buffers for gradients; of the policy or of the critic.
        optimizer: Megatron-core's, of these chunks.
    """

    def __call__(self, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, /) -> None: ...


class ModelProvider(Protocol):
    """`model.custom_model_provider_path`: makes one pipeline chunk of a model of Megatron-core.

    Called for policy and critic. Weights are loaded afterwards, by their names.

    Args:
        build: makes the chunk that would be made without the function; arguments by name take the place of what it
            gives to its class (`build.arguments`), a subclass of GPTModel (`build.kind`).
        pre_process: it has the embedding.
        post_process: it has the final norm, and the output layer or value head.
        vp_stage: which chunk of this rank, with an interleaved pipeline.

    Returns:
        An object of `build.kind` or of a subclass of it.
    """

    def __call__(self, build: Any, pre_process: bool, post_process: bool, vp_stage: int | None, /) -> Any: ...


class Engine(Protocol):
    """The client of one inference engine. The wire is SGLang's HTTP API.

    Every method raises EngineError, naming the engine, when the engine refuses or cannot be reached.
    """

    @property
    def address(self) -> EngineAddress: ...

    async def health(self, *, timeout_s: float = 5.0) -> bool:
        """True when the engine answers within the time; never raises."""
        ...

    async def info(self) -> dict[str, Any]:
        """`/model_info` and `/server_info` in one; has at least `weight_version` (int) and `vocab_size` (int)."""
        ...

    async def weight_version(self) -> WeightVersion:
        """Of the weights it holds; a part of `info` that is quick to ask for."""
        ...

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, n: int = 1, rid: str | None = None
    ) -> list[Generation]:
        """`n` answers to one prompt. Sample j of n uses `sampling_seed + j`."""
        ...

    def stream(
        self, input_ids: Sequence[int], params: SamplingParams, *, rid: str | None = None
    ) -> AsyncIterator[Generation]:
        """The answer as it grows: each item holds all of it so far, the last one has a finish reason.

        Closing the iterator ends the request.
        """
        ...

    async def abort(self, rid: str | None = None) -> None:
        """Ends one request, or all; partial answers are returned to their callers with finish reason `abort`."""
        ...

    async def pause(self, mode: str = "retract") -> None:
        """Stops decoding until `resume`; new requests wait.

        `abort` ends what runs with partial answers; `retract` queues it again and recomputes its cache on resuming;
        `in_place` leaves it with its cache, so that an update of the weights must not flush.
        """
        ...

    async def resume(self) -> None: ...

    async def flush_cache(self) -> None: ...

    async def release_memory(self, tags: Collection[str] = ()) -> None:
        """Frees `weights`, `kv_cache` or (no tags) both. Nothing may run; pause before it."""
        ...

    async def resume_memory(self, tags: Collection[str] = ()) -> None:
        """Takes memory back. The weights then have no content until all of them have been sent."""
        ...

    async def join_weight_group(self, group: WeightGroup, rank_offset: int) -> None: ...

    async def leave_weight_group(self, name: str) -> None: ...

    async def begin_weight_update(self) -> None: ...

    async def receive_bucket(self, bucket: WeightBucket, *, group_name: str, version: WeightVersion) -> None:
        """Takes part in the broadcast of one bucket. Raises WeightSyncError naming a tensor that arrived changed."""
        ...

    async def end_weight_update(self, version: WeightVersion) -> None: ...

    async def update_from_tensor(self, payloads: Sequence[str], *, load_format: str | None) -> None:
        """Takes weights that lie in memory of this machine, one payload for each rank of the engine.

        Raises WeightSyncError naming a tensor that arrived changed.
        """
        ...

    async def update_from_disk(
        self, folder: Path, *, version: WeightVersion, checksums: Mapping[str, str], load_format: str | None = None
    ) -> None:
        """Loads all weights from a folder the engine can see, which then are `version`. Needs no begin and end.

        Raises WeightSyncError naming a tensor whose checksum is another.
        """
        ...

    async def checksums(self) -> dict[str, str]:
        """Checksum of every weight the engine holds, by Hugging Face name."""
        ...

    async def close(self) -> None: ...


class WeightReceiver(Protocol):
    """The engine's end of the weight channels (inside the engine process)."""

    @property
    def formats(self) -> list[str]:
        """The forms of weights it reads beyond SGLang's own."""
        ...

    def join(self, group: WeightGroup, rank: int) -> None: ...

    def open_bucket(self, bucket: WeightBucket, group_name: str) -> IncomingWeights:
        """One bucket of a broadcast that this joins at once. Raises WeightSyncError for a group it is not in."""
        ...

    def leave(self, name: str) -> None: ...

    def open_tensors(self, payload: str, load_format: str) -> IncomingWeights:
        """What one entry of `serialized_named_tensors` announces. Raises ValueError for one that cannot be read."""
        ...

    def open_folder(
        self, folder: Path, *, load_format: str | None, version: WeightVersion | None, checksums: Mapping[str, str]
    ) -> IncomingWeights:
        """The weights in a folder. Raises ValueError when there are none, WeightSyncError naming what is broken."""
        ...


class IncomingWeights(Protocol):
    """Weights that have been announced to an engine and not been read yet."""

    @property
    def layout(self) -> WeightBucket:
        """What they are; checksums only where they are known beforehand."""
        ...

    def write(self, targets: Sequence[Tensor] | None) -> dict[str, str]:
        """Reads each tensor, verifies it and writes it into its target (in the target's dtype); returns checksums.

        Without targets they are only verified. Raises WeightSyncError naming the tensor; targets may then be a mixture.
        """
        ...


class WeightChannel(Protocol):
    """The trainer's end: carries weights to all engines and verifies them. Called on every trainer rank alike."""

    def connect(self, engines: Sequence[EngineAddress]) -> None: ...

    def push(self, weights: Iterator[tuple[str, Tensor]], version: WeightVersion) -> WeightSyncReport:
        """Sends all weights (Hugging Face names, full tensors) and then the version.

        Raises WeightSyncError, naming the tensor or the engine, when an engine ends with anything else.
        """
        ...

    def close(self) -> None: ...


class TrainBackend(Protocol):
    """One trainer rank, a plain SPMD object: every method is called on every rank with the same arguments."""

    def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult:
        """Advantages, loss and one optimiser step for each plan."""
        ...

    @property
    def senders(self) -> Sequence[int]:
        """The ranks that bring the weights to the engines: together they get all of them, each on one of them."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters in full under their Hugging Face names, in a fixed order (a collective).

        Each comes on one of the `senders`; ranks beside them may get none. What it gives may be the memory of the model
        itself: it is good until the next call of any method.
        """
        ...

    def rest(self) -> None:
        """Leaves the device to the engines, where they share it, until the next call. Every other method but `weights`
        ends with it."""
        ...

    def save(self, folder: Path) -> None:
        """Writes model, optimiser, schedule and random states of all ranks into an existing folder (a collective).

        With `megatron.async_save` it may return before, when training can go on: `finish_saving` says the rest.
        """
        ...

    def finish_saving(self) -> None:
        """Returns when all of what was saved is on disk. Not a collective; called beside any other method."""
        ...

    def load(self, folder: Path) -> None:
        """The inverse of `save`; the number of ranks may differ (random states are then seeded anew)."""
        ...

    def export_hf(self, folder: Path) -> None:
        """Writes a folder that `transformers` loads (a collective)."""
        ...

    def close(self) -> None: ...


class Trainers(Protocol):
    """All trainer ranks as the controller sees them."""

    async def train(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> TrainResult: ...

    async def loss(self, batch: TrainBatch, steps: Sequence[StepPlan]) -> float:
        """Mean of -logprob over the trainable tokens of all steps; changes nothing."""
        ...

    async def connect(self, engines: Sequence[EngineAddress]) -> None: ...

    async def sync_weights(self, version: WeightVersion) -> WeightSyncReport: ...

    async def save(self, folder: Path) -> None: ...

    async def finish_saving(self) -> None:
        """Returns when all of what was saved is on disk, which may be later than `save` (`megatron.async_save`)."""
        ...

    async def load(self, folder: Path) -> None: ...

    async def export_hf(self, folder: Path) -> None: ...


class RolloutSource(Protocol):
    """Prompts by rollout, and finished groups: generated by engines and rewarded, or read from data (SFT)."""

    @property
    def has_rewards(self) -> bool:
        """Whether the samples carry rewards."""
        ...

    def take(self, rollout_id: int) -> list[tuple[int, Prompt]]:
        """The prompts of the next rollout, each with the index of its group; moves the position on."""
        ...

    async def group(self, index: int, prompt: Prompt, *, oldest: WeightVersion, newest: WeightVersion | None) -> Group:
        """One finished group. A sample that an engine aborted is in it, unrewarded.

        Args:
            index: of the group, from `take`.
            prompt: likewise.
            oldest: weights that the engines are known to hold; an older token is an engine's fault.
            newest: likewise the newest; None: weights may be updated while the group is generated.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON values: what `take` gives next."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position from `state_dict`."""
        ...


class MetricSink(Protocol):
    """Receives every metric of a run."""

    def log(self, metrics: Metrics, *, step: int) -> None: ...

    def rewind(self, step: int) -> None:
        """Forgets what was logged at this step and later: the run went back to a checkpoint and logs it again."""
        ...

    def close(self) -> None: ...
