"""Checks of your own functions, for your own tests. No model, no engine, no GPU.

Example, in `test_my_reward.py`, run by pytest:

    from my_reward import score
    from rlscale.testing import adapt, check_reward, example_groups

    def test_score() -> None:
        assert check_reward(adapt("reward", score))[0] == 1.0

Each `check_*` calls the function with `example_groups()`, or with groups that you pass, checks what it returns as a run
does, and returns it. A function that breaks its contract raises ContractError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlscale.agents.agent_contracts import check_environment, check_tool
from rlscale.config import BatchConfig, RunConfig
from rlscale.config.user_functions import names_judge
from rlscale.errors import ConfigError
from rlscale.hook_protocols import Judge
from rlscale.plugins.args_view import Args
from rlscale.plugins.contracts import (
    CONTRACTS,
    Contract,
    ContractError,
    check_all_samples_hook,
    check_batch_conversion,
    check_buffer_filter,
    check_data_source,
    check_dynamic_filter,
    check_eval_log,
    check_evaluation,
    check_generate,
    check_group_reward,
    check_loss,
    check_reward,
    check_reward_post_process,
    check_rollout,
    check_rollout_log,
    check_sample_filter,
)
from rlscale.plugins.example_groups import example_groups
from rlscale.plugins.example_judge import ExampleJudge
from rlscale.plugins.load_plugin import adapt_function
from rlscale.plugins.sample_view import DocumentSample, to_document

__all__ = [
    "ContractError",
    "DocumentSample",
    "ExampleJudge",
    "adapt",
    "check_all_samples_hook",
    "check_batch_conversion",
    "check_buffer_filter",
    "check_data_source",
    "check_dynamic_filter",
    "check_environment",
    "check_eval_log",
    "check_evaluation",
    "check_generate",
    "check_group_reward",
    "check_loss",
    "check_reward",
    "check_reward_post_process",
    "check_rollout",
    "check_rollout_log",
    "check_sample_filter",
    "check_tool",
    "example_args",
    "example_groups",
    "to_document",
]


def adapt(
    kind: str,
    function: Callable[..., Any],
    *,
    config: RunConfig | None = None,
    custom: Mapping[str, Any] | None = None,
    judge: Judge | None = None,
) -> Callable[..., Any]:
    """The function with the arguments of rlscale, whichever of the two forms it has.

    Args:
        kind: a kind of `rlscale-check-plugin`, e.g. `reward`.
        config: values of `args`; None: that of `example_args`.
        custom: the node `custom`, for a parameter of that name and for `args`.
        judge: for a reward with a parameter of that name; None: `ExampleJudge()`.

    Raises:
        ContractError: it cannot be called with the arguments of either form.
    """
    contract: Contract = CONTRACTS[kind]
    try:
        return adapt_function(
            contract.key,
            function,
            args=example_args(config, custom=custom),
            custom=custom or {},
            judge=judge or (ExampleJudge() if names_judge(function) else None),
        )
    except ConfigError as error:
        (problem,) = error.problems
        raise ContractError(problem.rule, problem.fix) from error


def example_args(config: RunConfig | None = None, *, custom: Mapping[str, Any] | None = None) -> Args:
    """`args` of a config; None: defaults, with two groups of four samples."""
    values = config or RunConfig(batch=BatchConfig(rollout_batch_size=2, n_samples_per_prompt=4))
    return Args(values, runtime=custom)
