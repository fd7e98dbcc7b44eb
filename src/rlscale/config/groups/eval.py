"""Group `eval`: held-out prompts and how they are answered."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import ConfigGroup
from rlscale.config.groups.patterns import DOTTED_PATH


@dataclass(kw_only=True)
class EvalConfig(ConfigGroup):
    """Evaluation."""

    interval: Annotated[
        int | None,
        Field(
            gt=0,
            description="Evaluate after every this many rollouts and, where `data.num_epoch` counts them, at the end "
            "of every epoch. Needs `eval.prompt_data`. None: never.",
        ),
    ] = None
    prompt_data: Annotated[
        list[str] | None,
        Field(
            min_length=1,
            description="Name and file of each set, in turn: `[name, path, name, path]`; one path alone is called "
            "`eval`. Files as in `data.prompt_data`. None: no evaluation.",
        ),
    ] = None
    skip_eval_before_train: Annotated[bool, Field(description="Do not evaluate before the first rollout.")] = False
    input_key: Annotated[
        str | None, Field(min_length=1, description="Field of a row that holds the prompt. None: `data.input_key`.")
    ] = None
    label_key: Annotated[
        str | None, Field(min_length=1, description="Field of a row that holds the answer. None: `data.label_key`.")
    ] = None
    n_samples_per_prompt: Annotated[int, Field(gt=0, description="Answers sampled for each prompt.")] = 1
    temperature: Annotated[
        float | None, Field(ge=0, description="Sampling temperature; 0 is greedy. None: `rollout.temperature`.")
    ] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, description="Nucleus sampling. None: `rollout.top_p`.")] = None
    top_k: Annotated[int | None, Field(ge=-1, description="Top-k sampling, -1: off. None: `rollout.top_k`.")] = None
    max_response_len: Annotated[
        int | None, Field(gt=0, description="Longest response, in tokens. None: `rollout.max_response_len`.")
    ] = None
    min_new_tokens: Annotated[
        int | None,
        Field(ge=0, description="Tokens that end an answer are not drawn before this many others. None: at once."),
    ] = None
    max_examples: Annotated[
        int | None, Field(gt=0, description="Use the first this many prompts of each set. None: all.")
    ] = None
    stop_reward: Annotated[
        float | None,
        Field(description="End the run once the mean reward over all sets reaches this. None: never."),
    ] = None
    config: Annotated[
        str | None,
        Field(
            min_length=1,
            description="YAML file with `eval.defaults` and `eval.datasets`, where each set can have its own sampling. "
            "Wins over `eval.prompt_data`. None: `eval.prompt_data`.",
        ),
    ] = None
    reward_key: Annotated[
        str | None,
        Field(min_length=1, description="Like `reward.key`, for evaluation. None: `reward.key`."),
    ] = None
    tool_key: Annotated[
        str | None, Field(min_length=1, description="Field of a row with tool schemas. None: `data.tool_key`.")
    ] = None
    function_path: Annotated[
        str | None,
        Field(
            pattern=DOTTED_PATH,
            description="Your own function, `package.module:name`, that makes an evaluation. None: "
            "`rollout.function_path`, else the loop that comes with rlscale.",
        ),
    ] = None
    num_batches: Annotated[
        int | None,
        Field(
            gt=0,
            description="Have the trainer measure the loss of supervised training at every evaluation, on the first "
            "this many times `batch.rollout_batch_size` prompts of each set with their labels. None: it does not.",
        ),
    ] = None
