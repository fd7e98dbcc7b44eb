"""All cases of the rules between keys."""

from tests.unit.config.rules import (
    cases_agent,
    cases_algo,
    cases_cluster,
    cases_disaggregation,
    cases_library_args,
    cases_low_precision,
    cases_model,
    cases_network,
    cases_parallel,
    cases_rewards,
    cases_sampling_params,
    cases_sandbox,
    cases_training,
)
from tests.unit.config.rules.valid_config import Values

CASES: list[tuple[str, Values, str, Values]] = [
    *cases_model.CASES,
    *cases_parallel.CASES,
    *cases_algo.CASES,
    *cases_training.CASES,
    *cases_cluster.CASES,
    *cases_disaggregation.CASES,
    *cases_library_args.CASES,
    *cases_low_precision.CASES,
    *cases_rewards.CASES,
    *cases_sampling_params.CASES,
    *cases_network.CASES,
    *cases_agent.CASES,
    *cases_sandbox.CASES,
]
"""Name of a rule, values that violate it, a part of the message, and similar values that satisfy it."""
