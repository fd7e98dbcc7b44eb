"""Protocols between the packages of rlscale.

    PromptSource ─ prompts ─> RolloutSource ─ groups ─> TrainBatch ─> Trainers ─ (one TrainBackend a rank)
                                 │    ▲                                  │
                              Reward  Engine <─ WeightReceiver ═ weights ═ WeightChannel

`rollout`, `engines`, `training`, `weights` and `checkpoint` do not import each other; they share these protocols only.
`control` calls the asynchronous protocols; a worker process implements the synchronous ones, called on every rank.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rlscale.images import Image
from rlscale.teacher_scores import TeacherScores
from rlscale.trajectory import Trajectory
from rlscale.types import (
    EngineAddress,
    Generation,
    Group,
    Prompt,
    Sample,
    SamplingParams,
    StepPlan,
    TrainBatch,
    TrainResult,
    WeightVersion,
)
from rlscale.weight_types import AdapterUpdate, RankChecksums, WeightBucket, WeightGroup, WeightSyncReport

if TYPE_CHECKING:
    from torch import Tensor

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


class Teacher(Protocol):
    """A server of distillation that scores given tokens."""

    async def score(self, token_ids: Sequence[int], *, start: int, images: Sequence[Image] = ()) -> TeacherScores:
        """Logprobs of `token_ids[start:]`, each given the tokens and images before it. Raises EngineError.

        Args:
            images: whose placeholders are in `token_ids`, in their order.
        """
        ...


@runtime_checkable
class Reward(Protocol):
    """Scores one finished sample. A plain or an async function; runs in a process that imports it.

    With `reward.key` it returns several numbers by name: that one is trained on, the others are metrics. A parameter
    `custom` receives the config's node of that name.

    Raises: anything; after `reward.max_retries` further calls the sample has failed (it never gets a zero for that).
    """

    def __call__(self, sample: Sample) -> float | Mapping[str, float]: ...


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

    async def load_adapter(self, update: AdapterUpdate) -> None:
        """Loads one version of an adapter. Requests that run keep theirs.

        Raises WeightSyncError naming a tensor whose checksum differs.
        """
        ...

    async def prune_adapter(self, name: str, *, num_kept: int) -> None:
        """Unloads all but the newest versions, for an engine that does not do so itself. Waits for their requests."""
        ...

    async def checksums(self) -> list[RankChecksums]:
        """Checksums of the weights of every rank that reports them: of the first pipeline stage."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectSettings:
    """Size of a rollout.

    With `num_groups=None` the rollout is the groups of the first draw, and none of them may be dropped.
    """

    num_groups: int | None = None
    max_groups: int | None = None  # kept if as many are finished when the rollout has num_groups; None: num_groups
    wave: int = 1  # groups in flight at the beginning, and drawn at once when some are missing
    takes_first_finished: bool = False  # partial rollouts
    in_rounds: bool = False  # partial rollouts: groups are finished, or return unfinished, together
    is_filled: bool = False  # with dropped groups, before further prompts are drawn
    keeps_dropped: bool = False  # until the rollout is trained, for a hook of all samples
    # The next rollout generates again what finishes beyond this one, dropped or not, as what is cancelled there: so it
    # does not depend on the speed of engines.
    repeats: bool = False


class RolloutSource(Protocol):
    """Source of prompts by rollout and of finished groups: generated and rewarded, or read from data (SFT)."""

    @property
    def has_rewards(self) -> bool:
        """True if the samples have rewards."""
        ...

    @property
    def settings(self) -> CollectSettings:
        """Size of a rollout."""
        ...

    @property
    def max_lag(self) -> int:
        """Weight updates by which a token may be older than `rollout.max_staleness` allows: partial rollouts."""
        ...

    def next_prompts(self, rollout_id: int, number: int | None = None) -> list[tuple[int, Prompt]]:
        """Returns the next prompts, each with the index of its group, and advances the position.

        Args:
            number: of prompts; None: a whole rollout.
        """
        ...

    async def draw(self, rollout_id: int, number: int | None = None) -> list[tuple[int, Prompt]]:
        """As `next_prompts`; a prompt source of the user runs outside of the event loop."""
        ...

    def trajectory_ids(self, index: int) -> Sequence[int]:
        """The ids of a group's trajectories."""
        ...

    async def group(
        self,
        index: int,
        prompt: Prompt,
        *,
        oldest: WeightVersion,
        newest: WeightVersion | None,
        before: Group | None = None,
    ) -> Group:
        """Generates one group. Samples that an engine aborted are included, without reward.

        Args:
            index: index of the group, from `next_prompts`.
            prompt: its prompt, from `next_prompts`.
            oldest: oldest version that the engines may have; a token of an older one is an error of the engine.
            newest: newest version that they may have; None: weights may be updated during generation.
            before: the group with the samples that it has so far, to be continued.
        """
        ...

    def reason_to_drop(self, group: Group) -> str | Awaitable[str | None] | None:
        """Name of the filter that drops a finished group; None: it is kept. Awaited where the filter takes time."""
        ...

    async def choose_buffered(self, groups: Sequence[Group], number: int) -> list[int]:
        """The indices of at most `number` groups of the buffer that come next."""
        ...

    def observe_dropped(self, group: Group, *, rollout_id: int) -> None:
        """Notes that a filter dropped a finished group of a rollout."""
        ...

    def observe(self, groups: Sequence[Group], *, rollout_id: int) -> None:
        """Notes that the groups of a rollout were trained on.

        Later draws may depend on their lengths and rewards, and on those of the groups that were dropped in it.
        """
        ...

    async def stop(self, indices: Sequence[int]) -> None:
        """Aborts the requests of groups: `group` returns them unfinished."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as JSON values: the next result of `next_prompts`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position from `state_dict`."""
        ...


EXHAUSTED_BUDGET = "exhausted_budget"
"""Entry of a trajectory's metadata: the name of the first budget by which the gateway refused a request."""

SAMPLED_PLACEHOLDERS = "sampled_placeholders"
"""Entry of a trajectory's metadata: why a request with images was refused whose answers have placeholders of images."""

FAILED_CALL = "failed_call"
"""Entry of a trajectory's metadata: why the last requests to the gateway failed without being wrong. None of them was
answered after that."""


class SessionAccess(Protocol):
    """Address and key of one session of the gateway."""

    @property
    def id(self) -> str: ...

    @property
    def base_url(self) -> str:
        """URL for clients of OpenAI's APIs, with `/v1`."""
        ...

    @property
    def anthropic_url(self) -> str:
        """URL for clients of Anthropic's API, which add `/v1` themselves."""
        ...

    @property
    def api_key(self) -> str: ...


class AgentGateway(Protocol):
    """Sessions of a gateway: an agent sends requests to its URL, and its trajectory grows by their tokens.

    Every method raises EngineError if the gateway cannot be reached or does not know the session.
    """

    async def open_session(
        self, trajectory: Trajectory, params: SamplingParams, *, lifetime_s: float, max_turns: int | None = None
    ) -> SessionAccess:
        """Opens a session for a trajectory without turns.

        Args:
            params: of the run; `max_new_tokens` is the limit of all answers together.
            lifetime_s: seconds until the key ends.
            max_turns: requests that are answered; None: no limit.
        """
        ...

    async def finish(self, session_id: str) -> Trajectory:
        """Ends a session and returns its trajectory: the turns of all answered requests, and the status of the last."""
        ...

    async def drop(self, session_id: str) -> None:
        """Ends a session without a result. Has no effect on one that is gone."""
        ...


class MetricSink(Protocol):
    """Destination of all metrics of a run."""

    def log(self, metrics: Metrics, *, step: int) -> None: ...

    def rewind(self, step: int) -> None:
        """Deletes what was logged at this step and later: the run resumed from a checkpoint and logs it again."""
        ...

    def close(self) -> None: ...
