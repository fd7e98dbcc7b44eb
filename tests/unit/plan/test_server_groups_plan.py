"""Plans of prefill and decode engines with different sizes."""

import json
from pathlib import Path

import pytest

from rlscale.plan.head_lines import head_lines
from tests.unit.plan.test_plan import H100, plan


def engine_file(folder: Path, *, decode_size: int) -> str:
    """The override with two prefill engines of two GPUs and two decode engines."""
    groups = [
        {"worker_type": "prefill", "num_gpus": 4, "num_gpus_per_engine": 2, "overrides": {"mem_fraction_static": 0.8}},
        {"worker_type": "decode", "num_gpus": 2 * decode_size, "num_gpus_per_engine": decode_size},
    ]
    path = folder / f"engines_{decode_size}.yaml"
    path.write_text(json.dumps({"sglang": [{"name": "default", "server_groups": groups}]}))
    return f"sglang.config={path}"


def test_prefill_and_decode_engines_are_planned_with_their_own_sizes(tmp_path: Path) -> None:
    found = plan("rollout=sglang", engine_file(tmp_path, decode_size=4))
    prefill, decode = found.prefill_engine, found.engine
    assert prefill is not None and decode is not None
    assert (prefill.gpus, decode.gpus) == (2, 4)
    assert prefill.weights == pytest.approx(2 * decode.weights)
    assert prefill.total == pytest.approx(0.8 * H100.memory_bytes)
    assert decode.total == pytest.approx(0.85 * H100.memory_bytes)
    names = [budget.where for budget in found.memory_budgets]
    assert names == ["GPU of a trainer rank", "GPU of a prefill engine", "GPU of a decode engine"]
    text = "\n".join(head_lines(found))
    assert "engines   2 prefill engines of 2 GPUs each and 2 decode engines of 4 GPUs each" in text
    values = found.to_dict()
    assert (values["prefill_engine"]["gpus"], values["layout"]["gpus_per_prefill_engine"]) == (2, 2)
    json.dumps(values)


def test_prefill_and_decode_engines_share_the_gpus_of_the_trainer(tmp_path: Path) -> None:
    keys = ("cluster=one_node_colocate", "cluster.actor_num_gpus_per_node=8", "rollout=sglang")
    found = plan(*keys, engine_file(tmp_path, decode_size=2))
    names = [budget.where.partition(",")[0] for budget in found.memory_budgets]
    assert names == ["GPU shared by trainer and prefill engine", "GPU shared by trainer and decode engine"]


def test_separate_engines_prefill_and_decode_at_the_same_time(tmp_path: Path) -> None:
    found = plan("rollout=sglang", engine_file(tmp_path, decode_size=4)).roofline
    seconds = {part.name: part.seconds for part in found.parts}
    training = sum(value for name, value in seconds.items() if name not in ("prefill", "decode", "weight sync"))
    longer = max(seconds["prefill"], seconds["decode"])
    assert found.separates and not found.overlaps
    assert found.seconds == pytest.approx(seconds["weight sync"] + longer + training)
