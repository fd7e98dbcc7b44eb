"""Sub-groups `reward.engine` and `reward.judge`: a second model, on separate engines, that scores samples."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup

DEFAULT_PROMPT = """\
Grade the response to the question from 0 (wrong) to 10 (correct and clear).

Question: {prompt}
Reference answer: {label}
Response: {response}

End with one line: Score: <number>"""


class RewardEngineKind(StrEnum):
    """Inference engines of a judge or reward model."""

    sglang = "sglang"
    embedded = "embedded"


@dataclass(kw_only=True)
class RewardEngineConfig(ConfigGroup):
    """Engines of a judge or reward model, on GPUs that neither trainer nor rollout engines use."""

    name: Annotated[str | None, Field(min_length=1)] = None
    """Model of the file `sglang.config`, which then sets the keys below. None: there is no such file, or its models are
    not asked by rewards.
    """

    num_gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of all of these engines. 0: there are none."""

    num_gpus_per_engine: Annotated[int, Field(gt=0)] = 1
    """GPUs of each of these engines."""

    hf_checkpoint: Annotated[str | None, Field(min_length=1)] = None
    """Hugging Face folder or hub id of the model; its weights stay as they are. None: the starting model of the run."""

    kind: RewardEngineKind | None = None
    """Inference engine. None: that of `rollout.engine`; with external rollout engines it must be set."""

    is_embedding: bool = False
    """The model is a reward model, which returns a number for a text (SGLang's `--is-embedding`): your reward calls
    `judge.score`. Only with SGLang.
    """

    max_context_len: Annotated[int | None, Field(gt=1)] = None
    """Maximum number of tokens of a prompt and its answer. None: the limit of the model."""

    server_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of these SGLang servers by SGLang's names, e.g. `{mem_fraction_static: 0.9}`."""


@dataclass(kw_only=True)
class JudgeConfig(ConfigGroup):
    """The built-in judge, `reward.type=judge`: asks the model of `reward.engine` for a number."""

    prompt: Annotated[str, Field(min_length=1)] = DEFAULT_PROMPT
    """Prompt of the judge, with `{response}`, and `{prompt}` and `{label}` if needed. It is a message of the user
    if the model has a chat template. `{{` and `}}` are braces.
    """

    pattern: Annotated[str, Field(min_length=1)] = r"(?i)score[\s:=*]{0,6}(-?\d+(?:\.\d+)?)"
    """Regular expression of the score in the judge's answer; its group is the number. The last match counts. An answer
    without a match is a failure, not a reward.
    """

    min_score: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Smallest valid score; a smaller one is a failure."""

    max_score: Annotated[float, Field(allow_inf_nan=False)] = 10.0
    """Largest valid score; a larger one is a failure."""

    max_new_tokens: Annotated[int, Field(gt=0)] = 512
    """Maximum length of the judge's answer, in tokens."""

    temperature: Annotated[float, Field(ge=0)] = 0.7
    """Sampling temperature of the judge. With 0 a judge repeats an answer without a score at each retry."""
