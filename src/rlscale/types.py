"""Values that cross a process or a package.

Shape legend: S samples, T packed tokens of all samples, R response tokens of one sample.
Columns are numpy arrays, which Ray's object store passes to every rank without a copy.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rlscale.expert_routes import RouteIds, RouteShape, merge_routes

if TYPE_CHECKING:
    from torch import Tensor

    from rlscale.images import Image
    from rlscale.teacher_scores import TeacherScores

WeightVersion: TypeAlias = int
"""Number of weight updates that the trainer has made; 0 is the initial checkpoint."""

UInt8 = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


class SampleStatus(StrEnum):
    """State of a sample. Only `completed` and `truncated` samples may be trained on."""

    pending = "pending"
    completed = "completed"
    truncated = "truncated"
    aborted = "aborted"  # by a weight update or the end of a rollout; it may be continued
    failed = "failed"  # see `Sample.failure`


class FailureCause(StrEnum):
    """Causes of a trajectory's failure. `policy` and `budget` are ends of an attempt, which is graded."""

    policy = "policy"  # e.g. an answer that cannot be parsed
    budget = "budget"  # tokens or turns ran out
    tool = "tool"
    environment = "environment"
    sandbox = "sandbox"
    grader = "grader"
    model_server = "model_server"
    controller = "controller"  # user code or rlscale around the trajectory

    @property
    def is_graded(self) -> bool:
        """Whether an attempt that ends this way gets a reward. The others are infrastructure: they are retried."""
        return self in (FailureCause.policy, FailureCause.budget)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Reason why a trajectory has no result. It is a value: it never becomes a reward.

    Example:
        Failure(cause=FailureCause.grader, message="reward of sample 3 must be finite, got nan")
    """

    cause: FailureCause
    message: str  # one line for the user; names file and row where there are some
    ended_as: SampleStatus | None = None  # status before its grader failed; None: the attempt itself failed


class ConversationPart(NamedTuple):
    """A part of a conversation for supervised training."""

    text: str
    is_learned: bool  # an answer, in the loss; False: context only


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of a prompt file, ready for an engine.

    Example:
        Prompt(index=3, text="470+205=", token_ids=(4, 7, 0, 11, 2, 0, 5, 12), label="675")
    """

    index: int  # 0-based row of the prompt source
    text: str  # as rendered by the chat template
    token_ids: tuple[int, ...]
    label: Any = None  # any JSON value, as in the row
    metadata: dict[str, Any] = field(default_factory=dict)
    turns: tuple[ConversationPart, ...] = ()  # the rest of a whole conversation, for supervised training
    images: "tuple[Image, ...]" = ()  # in the order of their placeholders
    messages: tuple[dict[str, Any], ...] = ()  # that `text` was rendered from; empty: the row has no messages

    @property
    def conversation(self) -> tuple[dict[str, Any], ...]:
        """The messages; a prompt without a chat template is one message of the user."""
        return self.messages or ({"role": "user", "content": self.text},)

    @property
    def label_text(self) -> str | None:
        """The label as text: a string as it is, another value as JSON (`true`, `2.0`); None: there is none."""
        return self.label if isinstance(self.label, str | None) else json.dumps(self.label, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters by the names of SGLang's `sampling_params`, and whether the engine returns routes."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 is off
    min_p: float = 0.0  # minimum probability of a token relative to the most likely one; 0 is off
    # Of tokens that the response already contains, a penalty reduces the logit: logprobs are those after penalties.
    repetition_penalty: float = 1.0  # divides a positive logit and multiplies a negative one; 1 is off
    frequency_penalty: float = 0.0  # subtracted for each occurrence; 0 is off
    presence_penalty: float = 0.0  # subtracted once; 0 is off
    stop: tuple[str, ...] = ()  # strings that end a response; its text ends before the string
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0  # tokens that end a response are not sampled before this many others
    ignore_eos: bool = False  # no token ends the response, `stop_token_ids` included; strings still do
    skip_special_tokens: bool = True  # in the text
    spaces_between_special_tokens: bool = True  # in the text, for tokenizers that support it
    no_stop_trim: bool = False  # the text keeps the string or token that ended it
    sampling_seed: int | None = None  # None: the engine chooses one
    others: Mapping[str, Any] = field(default_factory=dict, hash=False)  # further parameters, only for SGLang
    # Not part of `sampling_params`:
    routes: RouteShape | None = None  # routes to return; None: no routes
    images: "tuple[Image, ...]" = ()  # of the input tokens, in the order of their placeholders
    max_context_len: int | None = None  # maximum tokens of prompt and response; None: the caller has checked them

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def with_values(self, values: Mapping[str, Any]) -> "SamplingParams":
        """A copy with these parameters by SGLang's names, e.g. `{"top_k": 4}`; None leaves one unchanged."""
        given = {name: value for name, value in values.items() if value is not None}
        own = {name: given.pop(name) for name in list(given) if name in self.__slots__}
        return replace(self, **own, others={**self.others, **given})

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
        # Values at SGLang's own default are omitted: some of its samplers reject keys that they do not need.
        for key, neutral in _WIRE_DEFAULTS.items():
            if getattr(self, key) != neutral:
                wire[key] = getattr(self, key)
        return {**wire, **self.others}


_WIRE_DEFAULTS: dict[str, Any] = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "sampling_seed": None,
}


def fit_context(params: SamplingParams, num_input_tokens: int) -> SamplingParams:
    """Parameters whose response fits into `max_context_len` after this number of input tokens.

    An engine refuses a request that could become longer than its context, so `max_new_tokens` is shortened, and
    `min_new_tokens` with it.
    """
    available = params.max_new_tokens
    if params.max_context_len is not None:
        available = min(available, params.max_context_len - num_input_tokens)
        assert available > 0, f"{num_input_tokens} input tokens must be fewer than {params.max_context_len}"
    if available == params.max_new_tokens and params.min_new_tokens <= available:
        return params
    return replace(params, max_new_tokens=available, min_new_tokens=min(params.min_new_tokens, available))


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Response of an engine to one request, or one of its `n` samples. Lists are [R]."""

    output_ids: list[int]
    logprobs: list[float]  # under the full temperature-scaled distribution, before top_p, top_k and min_p
    weight_versions: list[WeightVersion]  # empty in partial responses of a stream
    finish_reason: str  # "stop" | "length" | "abort"; "" in partial responses of a stream
    text: str
    engine: str  # name of the engine that responded
    queued_s: float = field(default=0.0, compare=False)  # before the engine began, as far as it is known
    # If requested, of prompt and response except the last token: [tokens - 1, layers, chosen]
    routes: RouteIds | None = field(default=None, compare=False)
    # Seconds since the epoch at which the request began and was answered; None: not measured
    interval_s: tuple[float, float] | None = field(default=None, compare=False)


AGENT = "agent"
"""Entry of a sample's metadata: counts of its turns and tool calls, and the rewards of its steps."""

ANSWER = "answer"
"""Entry of the metadata of a sample with several answers of the policy: the text of the last one."""

REWARDS, REWARD_WEIGHTS = "rewards", "reward_weights"
"""Entries of a sample's metadata: rewards by name, and the weights of those that are summed."""


class SampleTurn(NamedTuple):
    """Part of a sample that one turn added: for logs, and to continue an aborted trajectory of an agent."""

    number: int  # of the turn in its trajectory; paths that share a turn have the same number there
    num_tokens: int
    sampled: bool
    messages: tuple[Mapping[str, Any], ...] = ()  # that the turn added; empty: not known
    text: str = ""  # of the tokens, with `messages` only
    interval_s: tuple[float, float] | None = None  # of its request, in seconds since the epoch


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """A root-to-leaf path of a trajectory, as trained: a prompt and its response.

    Invariant: `response_tokens`, `loss_mask`, `rollout_logprobs`, `weight_versions` have equal length, and `routes`, if
    not None, that of `tokens`; only `append` extends them.

    Example:
        sample = Sample(index=0, group_index=0, prompt=prompt, seed=42)
        sample.append([2, 5], logprobs=[-0.1, -0.3], weight_versions=[7, 7])
    """

    index: int  # of the trajectory, unique in the run
    group_index: int  # unique in the run
    prompt: Prompt
    seed: int
    path: int = 0  # number of this path among those of its trajectory
    response_tokens: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # [R]
    loss_mask: UInt8 = field(default_factory=lambda: np.empty(0, np.uint8))  # [R] 1: trainable
    rollout_logprobs: Float32 = field(default_factory=lambda: np.empty(0, np.float32))  # [R]
    weight_versions: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # [R]
    response: str = ""
    status: SampleStatus = SampleStatus.pending
    reward: float | None = None
    failure: Failure | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    routes: RouteIds | None = None  # [tokens, layers, chosen] by the engine
    images: "tuple[Image, ...]" = ()  # of the prompt and of later turns, in the order of their placeholders
    turns: tuple[SampleTurn, ...] = ()  # of the response; empty: not known, e.g. after a resume
    teacher: "TeacherScores | None" = None  # [R] by the server of `model.teacher_url`

    def __post_init__(self) -> None:
        self.images = self.images or self.prompt.images

    def __eq__(self, other: object) -> bool:
        """Equal values of every field; routes and turns are not compared."""
        if not isinstance(other, Sample):
            return NotImplemented
        pairs = [
            (getattr(self, each.name), getattr(other, each.name))
            for each in fields(self)
            if each.name not in ("routes", "turns")
        ]
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)

    @property
    def answer(self) -> str:
        """Text of the policy's last answer: what graders compare with the label. With one turn it is the response."""
        return str(self.metadata.get(ANSWER, self.response))

    @property
    def prompt_len(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def response_len(self) -> int:
        return len(self.loss_mask)

    @property
    def num_tokens(self) -> int:
        """Length of prompt and response."""
        return self.prompt_len + self.response_len

    @property
    def tokens(self) -> Int32:
        """Prompt and response, joined by each call and read-only: a change would have no effect. [P + R]"""
        joined = np.concatenate([np.asarray(self.prompt.token_ids, np.int32), self.response_tokens])
        joined.flags.writeable = False
        return joined

    @property
    def response_ids(self) -> list[int]:
        return self.response_tokens.tolist()  # type: ignore[no-any-return]

    def append(
        self,
        token_ids: Sequence[int] | Int32,
        *,
        logprobs: Sequence[float] | Float32,
        weight_versions: Sequence[WeightVersion] | Int32,
        trainable: bool = True,
        routes: RouteIds | None = None,
    ) -> None:
        """Extends the response by N tokens. Copies all columns: appending token by token takes quadratic time.

        Args:
            trainable: false for tokens that the policy did not generate (tool output).
            routes: of all tokens but the last, [tokens - 1, layers, chosen]. A token keeps the first one that it gets.
        """
        num = len(token_ids)
        assert num == len(logprobs) == len(weight_versions), "columns of a sample must have equal length"
        self.response_tokens = np.concatenate([self.response_tokens, np.asarray(token_ids, np.int32)])
        self.loss_mask = np.concatenate([self.loss_mask, np.full(num, trainable, np.uint8)])
        self.rollout_logprobs = np.concatenate([self.rollout_logprobs, np.asarray(logprobs, np.float32)])
        self.weight_versions = np.concatenate([self.weight_versions, np.asarray(weight_versions, np.int32)])
        if routes is not None or self.routes is not None:
            self.routes = merge_routes(self.routes, routes, num_tokens=self.num_tokens)


@dataclass(kw_only=True, slots=True)
class Group:
    """The samples of one prompt; group-centred estimators normalise rewards within it."""

    index: int  # unique in the run
    prompt: Prompt
    samples: list[Sample]
    failed: list[Sample] = field(default_factory=list)  # neither trained on nor part of the baseline

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended; False for a prompt without samples, too."""
        unfinished = (SampleStatus.pending, SampleStatus.aborted)
        return bool(self.samples or self.failed) and all(sample.status not in unfinished for sample in self.samples)

    def trajectory_rewards(self) -> list[float]:
        """One reward for each trajectory, however many samples it has; without the failed ones."""
        rewards = {sample.index: sample.reward for sample in self.samples}
        return [reward for reward in rewards.values() if reward is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """A rollout as ragged columns: sample i owns `tokens[offsets[i]:offsets[i + 1]]`.

    Token columns are aligned with `tokens`; their values at prompt tokens are 0 (`weight_versions`: -1), except for
    `routes`, which covers prompts too.
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
    version: WeightVersion  # current weights when the rollout was passed to the trainer
    rollout_id: int = 0
    logprob_samples: tuple[int, ...] = ()  # samples whose logprobs the trainer returns
    returns_columns: bool = False  # the trainer returns its token columns
    routes: RouteIds | None = field(default=None, compare=False)  # [T, layers, chosen] by engines; None: not requested
    # [S, K] rewards by name, the same for all samples of a trajectory; None: `rewards` is the only one
    named_rewards: Float32 | None = None
    reward_names: tuple[str, ...] = ()  # [K]
    reward_weights: tuple[float, ...] = ()  # [K] in the sum over names; empty: 1 each
    teacher: "TeacherScores | None" = None  # [T] by teachers behind URLs
    images: "tuple[tuple[Image, ...], ...]" = ()  # [S] of each sample; empty: no sample has any
    # `num_trainable`, once counted
    _counts: list[Int64] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def num_samples(self) -> int:
        return len(self.prompt_lens)

    @property
    def lengths(self) -> Int64:
        """Tokens of each sample, prompt included. [S]"""
        return np.diff(self.offsets)

    @property
    def num_trainable(self) -> Int64:
        """Trainable tokens of each sample, counted by the first call, which makes the mask read-only. [S]

        One pass over the mask: `np.add.reduceat` would first copy it to a wider type, and the indices of all trainable
        tokens take 8 bytes each.
        """
        if not self._counts:
            counts = [np.count_nonzero(self.loss_mask[start:end]) for start, end in pairwise(self.offsets.tolist())]
            self._counts.append(np.asarray(counts, dtype=np.int64))
            self.loss_mask.flags.writeable = False
        return self._counts[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenColumns:
    """The response tokens of a micro-batch or a rollout, as passed to a user's function of `algo`.

    [T] each, on one device, logprobs and entropy in float32. A column is None if the run does not compute it. Values
    where `mask` is false are undefined. `TokenLayout.from_columns` of `rlscale.algo` sums them by sample.
    """

    mask: "Tensor"  # bool
    sample_ids: "Tensor"  # int64, 0-based: of the micro-batch, or of the rollout
    num_samples: int
    old_logprobs: "Tensor | None" = None  # by the trainer, of the policy that is improved
    rollout_logprobs: "Tensor | None" = None  # reported by the engine
    ref_logprobs: "Tensor | None" = None  # of the reference model
    advantages: "Tensor | None" = None
    entropy: "Tensor | None" = None  # of the policy; with gradient if algo.entropy_coef is not 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutColumns:
    """Part of a rollout as passed to a user's function.

    For advantages, all trajectories on every rank: a trajectory of several samples is one row here, whose tokens are
    those of its samples in order. For postprocessing, the samples of a rank. S trajectories or samples.
    """

    rewards: "Tensor"  # [S]
    group_ids: "Tensor"  # [S] int64; samples of one prompt share one
    trajectory_ids: "Tensor"  # [S] int64; samples of one trajectory (a fan-out) share one
    tokens: TokenColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples:
    """The samples of one optimiser step over all ranks, as passed to a user's reducer; the same on every rank."""

    num_trainable: "Tensor"  # [S] int64: trainable tokens
    trajectory_ids: "Tensor"  # [S] int64; samples of one trajectory (a fan-out) share one
    group_ids: "Tensor"  # [S] int64; samples of one prompt share one
    rewards: "Tensor"  # [S]
    max_response_len: int  # in tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One optimiser step: samples by rank and micro-batch, and the loss denominators."""

    # Every rank has the same number of micro-batches; an empty one (no samples) still joins the collectives.
    microbatches: tuple[tuple[tuple[int, ...], ...], ...]  # [rank][micro-batch] -> sample indices into the batch
    num_trajectories: int  # with at least one trainable token
    num_tokens: int  # trainable
    scoring: tuple[tuple[tuple[int, ...], ...], ...] | None = None  # of passes without gradient; None: the same

    @property
    def sample_indices(self) -> Iterator[int]:
        return (i for rank in self.microbatches for micro in rank for i in micro)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """Result of training on one rollout; every number is already reduced over all ranks."""

    steps: list[dict[str, float]]  # metrics of each optimiser step, e.g. "loss", "grad_norm", "lr"
    metrics: dict[str, float]  # metrics of the whole rollout, e.g. "logprob_diff/mean"
    seconds: dict[str, float] = field(default_factory=dict)  # duration by phase
    num_epochs: int = 1  # passes over the rollout; `steps` has those of the first one, of the second one, ...
    # Of the samples in `TrainBatch.logprob_samples`, by the weights before this rollout's steps. [R]; NaN: not computed
    logprobs: dict[int, Float32] = field(default_factory=dict)
    # [T] of all samples, by name: advantages, returns, values, logprobs of other passes; with `returns_columns`
    columns: dict[str, Float32] = field(default_factory=dict)
    device_flops: float | None = None  # operations per second of one rank's device; None: not known


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAddress:
    """Address of an engine. `name` is used in messages, e.g. `engine 0`."""

    name: str
    url: str
    num_ranks: int = 1  # processes that join a weight group
    api_key: str | None = field(default=None, repr=False)
    proxy: str | None = field(default=None, repr=False)  # HTTP proxy on the way to it; None: direct requests
    adapter: str | None = None  # this run's, on an engine that jobs share or that is SGLang; None: its only policy's
    names_versions: bool = False  # SGLang: requests state the version of `adapter`, which has its own name
    keeps_draft: bool = False  # SGLang: it drafts tokens with another model, whose weights no sync replaces
