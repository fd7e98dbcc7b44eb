"""Parallel sizes and places of SGLang's servers as a user types them: each works, or its advice does."""

import re

import pytest

from tests.engine_sizes import BASE, REFUSED, WORKING, typed
from tests.unit.config.config_errors import config_errors, only_error

FORM = re.compile(r"sglang\.\w+ must .+, got .+; .+ \(command line\)")


@pytest.mark.parametrize("arguments", WORKING, ids=str)
def test_sizes_that_work_are_accepted(arguments: dict[str, object]) -> None:
    assert config_errors(*BASE, *typed(arguments)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "path", "message"), REFUSED, ids=str)
def test_the_advice_works(arguments: dict[str, object], path: str, message: str) -> None:
    error = only_error([*BASE, *typed(arguments)])
    assert FORM.fullmatch(error) and error.startswith(f"sglang.{path} must ") and message in error
    advice = error.rpartition("; ")[2]
    given = {name: value for name, value in arguments.items() if name != path}
    number = re.match(r"set it to (\d+)", advice)
    if number is not None:
        given[path] = int(number[1])
    else:
        assert advice.startswith("remove it")
    assert config_errors(*BASE, *typed(given)) == []


def test_the_advice_for_the_tensor_parallel_size_works() -> None:
    error = only_error([*BASE, "sglang.tp_size=4"])
    assert "set cluster.rollout_num_gpus_per_engine, the GPUs of one engine" in error
    assert config_errors(*BASE, "cluster.rollout_num_gpus_per_engine=4") == []


@pytest.mark.parametrize(
    ("overrides", "message", "advice"),
    [
        # 32 query heads and 4 key heads: each of 6 or 12 ranks would have a fraction of one.
        ((), "must divide model.num_attention_heads=32, got 6; set it to 4", 4),
        (("sglang.pp_size=2",), "must be 2 times a divisor of model.num_attention_heads=32, got 6; set it to 4", 4),
        (
            ("sglang.attn_dp_size=2",),
            "must be 2 times a divisor of model.num_attention_heads=32, got 6; set it to 4",
            4,
        ),
        (("sglang.attn_dp_size=3",), None, None),
        (("sglang.enable_dp_attention=true", "sglang.dp_size=6"), None, None),
    ],
)
def test_heads_are_divided_in_each_stage_and_attention_group(
    overrides: tuple[str, ...], message: str | None, advice: int | None
) -> None:
    six = (*BASE, "cluster.num_gpus_per_node=6", "cluster.rollout_num_gpus=12", *overrides)
    six = (*six, "cluster.actor_num_gpus_per_node=6", "model.num_experts=6", "batch.rollout_batch_size=12")
    found = config_errors(*six, "cluster.rollout_num_gpus_per_engine=6")
    found = [error for error in found if "heads" in error]
    if message is None:
        assert found == []
        return
    assert len(found) == 1 and f"cluster.rollout_num_gpus_per_engine {message}" in found[0]
    fixed = config_errors(*six, f"cluster.rollout_num_gpus_per_engine={advice}")
    assert not [error for error in fixed if "heads" in error]
