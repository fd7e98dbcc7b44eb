"""Values that cross a process or a package.

Shape legend: S samples, T tokens of all samples laid end to end, R response tokens of one sample.
Columns are numpy arrays, so that Ray's object store hands them to every rank without a copy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

WeightVersion: TypeAlias = int
"""Number of weight updates the trainer had made; 0 is the starting checkpoint."""

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
RouteIds: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
"""Experts by token and layer, counted from 0; the largest number of the type stands where none is known."""


class SampleStatus(StrEnum):
    """Where a sample stands. Only `completed` and `truncated` samples may be trained on."""

    pending = "pending"
    completed = "completed"
    truncated = "truncated"
    aborted = "aborted"


class Turn(NamedTuple):
    """A part of a conversation that is trained on as a whole."""

    text: str
    is_learned: bool  # an answer; else it is only read


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a prompt file, ready for an engine.

    Example:
        Prompt(index=3, text="470+205=", token_ids=(4, 7, 0, 11, 2, 0, 5, 12), label="675")
    """

    index: int  # 0-based row of the prompt source
    text: str  # as rendered by the chat template
    token_ids: tuple[int, ...]
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    turns: tuple[Turn, ...] = ()  # what follows it, where supervised training learns whole conversations


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteShape:
    """What the routes of a model with experts look like."""

    num_layers: int  # of the model; those without experts are counted, and their entries mean nothing
    num_chosen: int  # experts of a token in a layer
    num_experts: int  # in a layer

    @property
    def dtype(self) -> "np.dtype[np.unsignedinteger[Any]]":
        """The smallest type that has room for all experts and for the mark of an unknown one."""
        return np.dtype(np.uint8 if self.num_experts <= np.iinfo(np.uint8).max else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.num_chosen * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How an engine samples, by the names of SGLang's `sampling_params`, and whether answers bring routes."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 is off
    min_p: float = 0.0  # least probability of a token, as a share of the likeliest one's; 0 is off
    stop: tuple[str, ...] = ()  # strings that end an answer; its text ends before the string
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0  # tokens that end an answer are not drawn before so many others
    ignore_eos: bool = False  # no token ends the answer, `stop_token_ids` included; strings still do
    skip_special_tokens: bool = True  # in the text
    spaces_between_special_tokens: bool = True  # in the text of the few tokenizers that have them
    no_stop_trim: bool = False  # the text keeps the string or token that ended it
    sampling_seed: int | None = None  # None: the engine draws one
    routes: RouteShape | None = None  # those that answers are to bring; None: none. Not among `sampling_params`

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of `/generate`."""
        wire: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "ignore_eos": self.ignore_eos,
        }
        if self.stop_token_ids:
            wire["stop_token_ids"] = list(self.stop_token_ids)
        if self.stop:
            wire["stop"] = list(self.stop)
        # What is at SGLang's own default is left out: some of its samplers refuse keys they do not need.
        for key, neutral in _WIRE_DEFAULTS.items():
            if getattr(self, key) != neutral:
                wire[key] = getattr(self, key)
        return wire


_WIRE_DEFAULTS: dict[str, Any] = {
    "min_p": 0.0,
    "min_new_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "sampling_seed": None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What an engine answered to one request, or to one of its `n` samples. Lists are [R]."""

    output_ids: list[int]
    logprobs: list[float]  # under the full temperature-scaled distribution, whatever top_p, top_k and min_p leave of it
    weight_versions: list[WeightVersion]  # empty while the answer grows
    finish_reason: str  # "stop" | "length" | "abort"; "" while the answer grows
    text: str
    engine: str  # name of the engine that answered
    # Where they were asked for, of prompt and answer but for the last token: [tokens - 1, layers, chosen]
    routes: RouteIds | None = field(default=None, compare=False)


@dataclass(kw_only=True, slots=True)
class Sample:
    """One trajectory: a prompt and what the policy made of it.

    Invariant: `loss_mask`, `rollout_logprobs`, `weight_versions` are as long as the response, and `routes` as `tokens`
    where there are any; only `append` grows them.

    Example:
        sample = Sample(index=0, group_index=0, prompt=prompt, seed=42)
        sample.append([2, 5], logprobs=[-0.1, -0.3], weight_versions=[7, 7])
    """

    index: int  # unique in the run
    group_index: int  # unique in the run
    prompt: Prompt
    seed: int
    tokens: list[int] = field(default_factory=list)  # prompt and response
    loss_mask: list[int] = field(default_factory=list)  # [R] 1: trainable
    rollout_logprobs: list[float] = field(default_factory=list)  # [R]
    weight_versions: list[WeightVersion] = field(default_factory=list)  # [R]
    response: str = ""
    status: SampleStatus = SampleStatus.pending
    reward: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    routes: RouteIds | None = field(default=None, compare=False)  # [tokens, layers, chosen] by the engine

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.prompt.token_ids)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def response_len(self) -> int:
        return len(self.loss_mask)

    @property
    def response_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def append(
        self,
        token_ids: Sequence[int],
        *,
        logprobs: Sequence[float],
        weight_versions: Sequence[WeightVersion],
        trainable: bool = True,
        routes: RouteIds | None = None,
    ) -> None:
        """Grows the response.

        Args:
            token_ids: [N]
            logprobs: [N]
            weight_versions: [N]
            trainable: false for tokens the policy did not choose (a tool's answer).
            routes: of all tokens so far but the last, [tokens - 1, layers, chosen]. A token that has one keeps it, as
                it was drawn with it; those without one have none until another call brings it.
        """
        assert len(token_ids) == len(logprobs) == len(weight_versions), "columns of a sample must grow together"
        self.tokens.extend(token_ids)
        self.loss_mask.extend([int(trainable)] * len(token_ids))
        self.rollout_logprobs.extend(logprobs)
        self.weight_versions.extend(weight_versions)
        if routes is not None or self.routes is not None:
            self.routes = _grown(self.routes, routes, num_tokens=len(self.tokens))


def _grown(known: RouteIds | None, given: RouteIds | None, *, num_tokens: int) -> RouteIds:
    """Routes of so many tokens: the known ones, what is given for others, and the mark of an unknown one elsewhere."""
    like = given if given is not None else known
    assert like is not None, "one of them is there"
    assert given is None or len(given) == num_tokens - 1, f"{len(given)} routes are not those of {num_tokens} tokens"
    unknown = np.iinfo(like.dtype).max
    grown = np.full((num_tokens, *like.shape[1:]), unknown, dtype=like.dtype)
    if given is not None:
        grown[:-1] = given
    if known is not None:
        has_one = (known != unknown).all(axis=(1, 2))
        grown[: len(known)][has_one] = known[has_one]
    return grown


@dataclass(kw_only=True, slots=True)
class Group:
    """The samples of one prompt, which group-centred estimators compare with each other."""

    index: int  # unique in the run
    prompt: Prompt
    samples: list[Sample]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """A rollout as ragged columns: sample i owns `tokens[offsets[i]:offsets[i + 1]]`.

    Token columns are aligned with `tokens`; their values on prompt tokens are 0 (`weight_versions`: -1), but `routes`
    has those of prompts, too.
    """

    tokens: Int32  # [T]
    loss_mask: npt.NDArray[np.uint8]  # [T]
    rollout_logprobs: Float32  # [T]
    weight_versions: Int32  # [T]
    offsets: Int64  # [S + 1]
    prompt_lens: Int32  # [S]
    rewards: Float32  # [S]
    group_ids: Int64  # [S]
    trajectory_ids: Int64  # [S] samples of one trajectory (a fan-out) share one and count once in the loss
    version: WeightVersion  # weights current when the rollout was handed to the trainer
    logprob_samples: tuple[int, ...] = ()  # samples whose logprobs the trainer returns
    routes: RouteIds | None = field(default=None, compare=False)  # [T, layers, chosen] by engines; None: not asked for

    @property
    def num_samples(self) -> int:
        return len(self.prompt_lens)

    @property
    def lengths(self) -> Int64:
        """Tokens of each sample, prompt included. [S]"""
        return np.diff(self.offsets)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenColumns:
    """The trainable tokens of a micro-batch, or of a rollout, as a user's function of `algo` sees them.

    [T] each, on one device, logprobs and entropy in float32. A column is None where the run does not compute it. Where
    `mask` is false there is a placeholder: the columns may hold anything there. `TokenLayout.from_columns` of
    `rlscale.algo` sums them by sample.
    """

    mask: "Tensor"  # bool
    sample_ids: "Tensor"  # int64, 0-based: of the micro-batch, or of the rollout
    num_samples: int
    old_logprobs: "Tensor | None" = None  # logprobs of the policy that is improved
    rollout_logprobs: "Tensor | None" = None  # logprobs the engine reported
    ref_logprobs: "Tensor | None" = None  # logprobs of the reference model
    advantages: "Tensor | None" = None
    entropy: "Tensor | None" = None  # of the policy; with a gradient where algo.entropy_coef is not 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutColumns:
    """Samples of a rollout as a user's function sees them: all of them on every rank, or those of a rank. S samples."""

    rewards: "Tensor"  # [S]
    group_ids: "Tensor"  # [S] int64; samples with the same one belong to one prompt
    tokens: TokenColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples:
    """The samples of one optimiser step over all ranks, as a user's reducer sees them, the same on every rank."""

    num_trainable: "Tensor"  # [S] int64: trainable tokens
    trajectory_ids: "Tensor"  # [S] int64; samples of one trajectory (a fan-out) have the same one
    group_ids: "Tensor"  # [S] int64; samples with the same one belong to one prompt
    rewards: "Tensor"  # [S]
    max_response_len: int  # tokens that a response may have at most


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One optimiser step: which rank computes which samples in which micro-batch, and the loss denominators.

    Every rank has the same number of micro-batches; an empty one (no samples) still takes part in collectives.
    """

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]  # [rank][micro-batch] -> sample indices into the batch
    num_trajectories: int  # with at least one trainable token
    num_tokens: int  # trainable
    # The same samples on the same ranks, for passes without gradient; None: as `microbatches`
    scoring: tuple[tuple[tuple[int, ...], ...], ...] | None = None

    @property
    def sample_indices(self) -> Iterator[int]:
        return (i for rank in self.microbatches for micro in rank for i in micro)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What training on one rollout gave; every number is already reduced over all ranks."""

    steps: list[dict[str, float]]  # metrics of each optimiser step, e.g. "loss", "grad_norm", "lr"
    metrics: dict[str, float]  # metrics of the whole rollout, e.g. "logprob_diff/mean"
    seconds: dict[str, float] = field(default_factory=dict)  # duration by phase
    # Of the samples in `TrainBatch.logprob_samples`, by the weights the rollout began with. [R]; NaN: not computed
    logprobs: dict[int, Float32] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAddress:
    """How to reach an engine. `name` is used in messages, e.g. `engine 0`."""

    name: str
    url: str
    num_ranks: int = 1  # processes that join a weight group
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightGroup:
    """A process group over which a trainer rank, rank 0 of the group, sends weights to engines."""

    name: str  # unique for the life of every member
    master_address: str
    master_port: int
    world_size: int
    backend: str  # "gloo" | "nccl"
    timeout_s: float
    num_links: int = 1  # connections between two members, used in turn; more than one: gloo, between our own servers


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBucket:
    """What travels beside the bytes of one bucket. Lists are aligned; `checksums` are of the tensors as sent."""

    names: list[str]
    dtypes: list[str]  # "float32", "bfloat16"
    shapes: list[list[int]]
    checksums: list[str]  # empty where they travel with the bytes
    load_format: str = "flattened_bucket"  # | "tensor_blocks"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSyncReport:
    """One finished weight sync."""

    version: WeightVersion
    num_buckets: int
    num_bytes: int
    seconds: float
