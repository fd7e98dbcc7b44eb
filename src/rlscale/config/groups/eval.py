"""Group `eval`: evaluation sets and their sampling settings."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rlscale.config.groups.base import DOTTED_PATH, ConfigGroup


@dataclass(kw_only=True)
class EvalConfig(ConfigGroup):
    """Evaluation sets and their sampling settings."""

    # Schedule and sets.
    interval: Annotated[int | None, Field(gt=0)] = None
    """Number of rollouts between two evaluations; with `data.num_epoch` also at the end of every epoch. Needs
    `eval.prompt_data` or `eval.config`. None: no evaluation.
    """

    prompt_data: Annotated[list[str] | None, Field(min_length=1)] = None
    """Names and files of the evaluation sets: `[name, path, name, path]`. A single path gets the name `eval`. File
    formats as in `data.prompt_data`. None: no evaluation unless `eval.config` is set.
    """

    skip_eval_before_train: bool = False
    """Skip the evaluation before the first rollout."""

    # Evaluations that run while the trainer works.
    max_weight_versions: Annotated[int | None, Field(gt=0)] = None
    """Maximum number of weight versions that generate one evaluation. 1: the next update of the engines, and a
    checkpoint, wait for a running evaluation, so that it measures one version. None: neither ever waits, and
    `eval/<set>/version_min` and `version_max` have the span. Only with `rollout.max_staleness` above 0.
    """

    max_concurrency: Annotated[int | None, Field(gt=0)] = None
    """Maximum number of samples that an evaluation requests at once while the trainer works, so that requests of
    rollouts do not queue behind it. None: as many as a rollout has. Only with `rollout.max_staleness` above 0.
    """

    input_key: Annotated[str | None, Field(min_length=1)] = None
    """Field of a row with the prompt. None: `data.input_key`."""

    label_key: Annotated[str | None, Field(min_length=1)] = None
    """Field of a row with the expected answer. None: `data.label_key`."""

    # Sampling parameters.
    n_samples_per_prompt: Annotated[int, Field(gt=0)] = 1
    """Number of samples per prompt."""

    temperature: Annotated[float | None, Field(ge=0)] = None
    """Sampling temperature; 0 is greedy. None: `rollout.temperature`."""

    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    """Nucleus sampling; 1: off. None: `rollout.top_p`."""

    top_k: Annotated[int | None, Field(ge=-1)] = None
    """Top-k sampling; -1: off. None: `rollout.top_k`."""

    max_response_len: Annotated[int | None, Field(gt=0)] = None
    """Maximum response length, in tokens. None: `rollout.max_response_len`."""

    min_new_tokens: Annotated[int | None, Field(ge=0)] = None
    """Minimum number of tokens before a token that ends the response can be sampled. None: `min_new_tokens` of
    `rollout.sampling_params`, else no minimum.
    """

    # Limits and other sources.
    keep_last: Annotated[int | None, Field(ge=0)] = None
    """Number of evaluations whose samples stay in `evaluations/` of the run folder, the newest ones, for the report and
    `rlscale-eval --regrade`. 0: samples are not written. None: all evaluations.
    """

    max_examples: Annotated[int | None, Field(gt=0)] = None
    """Maximum number of prompts per set; the first ones are used. None: all prompts."""

    stop_reward: float | None = None
    """End the run once the mean reward over all sets reaches this value. None: never."""

    config: Annotated[str | None, Field(min_length=1)] = None
    """YAML file with `eval.defaults` and `eval.datasets`, in which each set can have its own sampling, stop, reward
    (`rm_type`, `custom_rm_path`), tools, chat template, metadata and generate function. Files of slime load as they
    are. Takes precedence over `eval.prompt_data`. None: `eval.prompt_data`.
    """

    reward_key: Annotated[str | None, Field(min_length=1)] = None
    """Like `reward.key`, for evaluation. None: `reward.key`."""

    tool_key: Annotated[str | None, Field(min_length=1)] = None
    """Field of a row with tool schemas. None: `data.tool_key`."""

    function_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that runs an evaluation. None: `rollout.function_path`, else the
    built-in loop.
    """

    custom_log_function_path: Annotated[str | None, Field(pattern=DOTTED_PATH)] = None
    """Your own function, `package.module:name`, that logs metrics of an evaluation. If it returns true, only
    metrics that it added or changed and `eval/reward_mean` are logged. None: built-in metrics only.
    """

    num_batches: Annotated[int | None, Field(gt=0)] = None
    """Compute the supervised loss at every evaluation, on the first `eval.num_batches` * `batch.rollout_batch_size`
    labelled prompts of each set. None: not computed. Only with `algo.loss_type=sft_loss`.
    """
