"""The argument `sample` of functions in slime's form, and its conversion from and to `Sample`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np

from rlscale.types import Group, Sample, SampleStatus

ATTRIBUTES = "document_attributes"
"""Entry of a sample's metadata with the further attributes that a generate function set."""


class DocumentStatus(Enum):
    """`sample.status`, with slime's values."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_FINISH_STATUS = {
    "stop": DocumentStatus.COMPLETED,
    "length": DocumentStatus.TRUNCATED,
    "abort": DocumentStatus.ABORTED,
}


@dataclass
class SpeculationInfo:
    """`sample.spec_info`: counts of speculative decoding."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Adds the counts of one answer of an engine."""
        for name in ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct"):
            setattr(self, name, getattr(self, name) + meta_info.get(name, 0))
        self.completion_token_num += meta_info.get("completion_tokens", 0)


@dataclass
class PrefixCacheCounts:
    """`sample.prefix_cache_info`: prompt tokens of the requests, and those that the engine had in its cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Adds the counts of one answer of an engine."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


@dataclass
class DocumentSample:
    """A sample as functions in slime's form see it. Further attributes may be set; they last as long as the object.

    Example:
        sample = DocumentSample(index=0, prompt="1+1=", tokens=[4, 11, 4, 12], label="2")
        sample.append_response_tokens(tokens=[5], log_probs=[-0.1])
    """

    Status = DocumentStatus  # read as `Sample.Status.COMPLETED`
    SpecInfo = SpeculationInfo
    PrefixCacheInfo = PrefixCacheCounts

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None  # the trajectory: samples of one execution share it
    prompt: Any = ""  # a string, or messages
    tokens: list[int] = field(default_factory=list)  # prompt and response
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None  # a number, or several by name
    loss_mask: list[int] | None = None  # None: every token of the response is trained
    weight_versions: list[str] = field(default_factory=list)  # of each request
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: DocumentStatus = DocumentStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpeculationInfo = field(default_factory=SpeculationInfo)
    prefix_cache_info: PrefixCacheCounts = field(default_factory=PrefixCacheCounts)

    def get_reward_value(self, args: Any) -> Any:
        """The number of a reward that returns several by name (`reward.key`), else the reward."""
        return self.reward[args.reward_key] if args.reward_key else self.reward

    @property
    def effective_response_length(self) -> int:
        """Number of trainable tokens."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Extends the response and its columns.

        Args:
            args: not used; a parameter that slime's method has.
            log_probs: of each token. Required with `trainable` and not allowed without it.
            meta_info: of the engine's answer; it sets the status and adds a weight version.
        """
        new_tokens = [int(token) for token in tokens or ()]
        logprobs = None if log_probs is None else [float(value) for value in log_probs]
        _check_append(new_tokens, logprobs, trainable=trainable)
        if new_tokens:
            length = self.response_length
            known = self.rollout_log_probs
            if known is None and trainable and length:
                raise ValueError(f"rollout_log_probs must cover the {length} tokens before trainable ones, got None")
            # In place, as in slime: a function may hold one of the lists and assign it again.
            self.tokens += new_tokens
            self.loss_mask = [1] * length if self.loss_mask is None else self.loss_mask
            self.loss_mask += [int(trainable)] * len(new_tokens)
            self.rollout_log_probs = [0.0] * length if known is None else known
            self.rollout_log_probs += [0.0] * len(new_tokens) if logprobs is None else logprobs
            self.response_length = length + len(new_tokens)
        self.response += text or ""
        if update_terminal_info and meta_info is not None and "finish_reason" in meta_info:
            self._add_answer(meta_info)

    def to_dict(self) -> dict[str, Any]:
        """All attributes, with status and counts as JSON values; the inverse of `from_dict`."""
        return vars(self) | {
            "status": self.status.value,
            "spec_info": dict(vars(self.spec_info)),
            "prefix_cache_info": dict(vars(self.prefix_cache_info)),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> DocumentSample:
        """The sample of `to_dict`; entries that are no field become attributes."""
        values = dict(data)
        values["status"] = DocumentStatus(values.get("status", "pending"))
        values["spec_info"] = SpeculationInfo(**values.get("spec_info", {}))
        values["prefix_cache_info"] = PrefixCacheCounts(**values.get("prefix_cache_info", {}))
        names = {each.name for each in fields(DocumentSample)}
        sample = DocumentSample(**{name: value for name, value in values.items() if name in names})
        vars(sample).update({name: value for name, value in values.items() if name not in names})
        return sample

    def _add_answer(self, meta_info: Mapping[str, Any]) -> None:
        self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(str(meta_info["weight_version"]))
        self.status = _FINISH_STATUS[meta_info["finish_reason"]["type"]]


def to_document(sample: Sample) -> DocumentSample:
    """A copy of `sample` in slime's form. Its metadata is that of the row and of the sample.

    It also has the further attributes that a generate function in slime's form set.
    """
    versions = np.asarray(sample.weight_versions).tolist()
    changes = [v for i, v in enumerate(versions) if not i or v != versions[i - 1]]
    metadata = sample.prompt.metadata | sample.metadata
    further = metadata.pop(ATTRIBUTES, {})
    document = DocumentSample(
        group_index=sample.group_index,
        index=sample.index,
        rollout_id=sample.index,
        prompt=sample.prompt.text,
        tokens=np.asarray(sample.tokens).tolist(),
        response=sample.response,
        response_length=sample.response_len,
        label=sample.prompt.label,
        reward=sample.reward,
        loss_mask=np.asarray(sample.loss_mask).tolist(),
        weight_versions=[str(version) for version in changes],
        rollout_log_probs=np.asarray(sample.rollout_logprobs).tolist(),
        status=DocumentStatus(str(sample.status)),
        metadata=metadata,
    )
    vars(document).update(further)
    return document


def to_documents(group: Group) -> list[DocumentSample]:
    """The samples of a group in slime's form."""
    return [to_document(sample) for sample in group.samples]


def copy_changes(source: DocumentSample, target: Sample) -> None:
    """Writes into `target` what a function in slime's form may change: loss mask, metadata, and `remove_sample`.

    Raises:
        ValueError: the loss mask has another length, or values other than 0 and 1.
    """
    mask: list[int] = [1] * target.response_len if source.loss_mask is None else [int(x) for x in source.loss_mask]
    if len(mask) != target.response_len or not set(mask) <= {0, 1}:
        raise ValueError(
            f"loss_mask of sample {target.index} must be {target.response_len} values of 0 or 1, got {mask[:8]} "
            f"(length {len(mask)})"
        )
    if source.remove_sample:
        mask = [0] * len(mask)
    _set_mask(target, mask)
    row, further = target.prompt.metadata, {k: v for k, v in target.metadata.items() if k == ATTRIBUTES}
    target.metadata = further | {
        k: v for k, v in source.metadata.items() if k in target.metadata or k not in row or row[k] != v
    }


def copy_group_changes(documents: Sequence[DocumentSample], group: Group) -> None:
    """Writes the changes of each sample back: see `copy_changes`."""
    for document, sample in zip(documents, group.samples, strict=True):
        copy_changes(document, sample)


def document_status(value: Any) -> SampleStatus:
    """The status of a sample that a function returned; some set it as a string."""
    return SampleStatus(DocumentStatus(getattr(value, "value", value)).value)


def _set_mask(target: Any, mask: list[int]) -> None:
    before = target.loss_mask
    target.loss_mask = np.asarray(mask, before.dtype) if isinstance(before, np.ndarray) else mask


def _check_append(tokens: Sequence[int], log_probs: Sequence[float] | None, *, trainable: bool) -> None:
    if log_probs is not None and len(log_probs) != len(tokens):
        raise ValueError(f"log_probs must be {len(tokens)} numbers, one for each token, got {len(log_probs)}")
    if tokens and trainable and log_probs is None:
        raise ValueError("log_probs must be given for trainable tokens, got None; request them with return_logprob")
    if tokens and not trainable and log_probs is not None:
        raise ValueError("log_probs must not be given with trainable=False; the engine did not generate these tokens")
