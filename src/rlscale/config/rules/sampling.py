"""Rules about how answers are sampled and where they end."""

from __future__ import annotations

from rlscale.config.errors import show
from rlscale.config.groups.rollout import EngineKind
from rlscale.config.rules.rule import rule
from rlscale.config.run_config import RunConfig
from rlscale.errors import Problem

MAX_STOP_STRINGS = 32  # SGLang's limit


@rule("rollout.stop")
def stop_strings_can_be_found(config: RunConfig) -> list[Problem]:
    strings = config.rollout.stop
    if strings is None:
        return []
    if "" in strings:
        fix = "leave the empty string out: every text contains it"
        return [Problem(path="rollout.stop", rule="hold no empty string", value=show(strings), fix=fix)]
    if len(strings) > MAX_STOP_STRINGS:
        rule = f"have at most {MAX_STOP_STRINGS} entries"
        return [Problem(path="rollout.stop", rule=rule, value=str(len(strings)), fix="keep the most likely ones")]
    return []


@rule("rollout.min_p", "rollout.engine", "sglang.server_args")
def seeds_exclude_min_p(config: RunConfig) -> list[Problem]:
    by_seed = config.sglang.server_args.get("enable_deterministic_inference", False)
    if config.rollout.engine != EngineKind.sglang or not by_seed or config.rollout.min_p == 0:
        return []
    rule, fix = "be 0 with sglang.enable_deterministic_inference", "SGLang cannot draw with both; drop one of them"
    return [Problem(path="rollout.min_p", rule=rule, value=show(config.rollout.min_p), fix=fix)]


@rule("eval.min_new_tokens", "eval.max_response_len", "rollout.max_response_len")
def evaluated_answers_can_be_long_enough(config: RunConfig) -> list[Problem]:
    least, own = config.eval.min_new_tokens, config.eval.max_response_len
    longest = config.rollout.max_response_len if own is None else own
    if least is None or least <= longest:
        return []
    rule = f"be at most the longest response of {longest} tokens"
    return [Problem(path="eval.min_new_tokens", rule=rule, value=show(least), fix=f"set it to {longest} at most")]
