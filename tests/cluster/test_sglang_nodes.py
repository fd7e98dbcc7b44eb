"""A real SGLang server on one node and its trainer on another: weights and requests cross the network between them."""

import json

import pytest

from rlscale.config.passthrough.sglang_python import check_python
from tests.cluster.conftest import NEEDS_NAMESPACES, ClusterRun

pytestmark = [NEEDS_NAMESPACES, pytest.mark.nightly]

SGLANG = ("rollout=sglang", "cluster.actor_num_nodes=1", "sglang.max_total_tokens=4096")


@pytest.mark.parametrize("channel", ["process_group", "disk"])
def test_weights_reach_a_server_of_sglang_on_another_node(run: ClusterRun, channel: str) -> None:
    if problems := check_python(None, serves=True, routes=False, on_cpu=True):
        pytest.fail("\n".join(map(str, problems)))
    assert run.run(*SGLANG, f"train.weight_channel={channel}", timeout_s=1500) == 0, run.output
    table = [line.partition("] ")[2].split() for line in run.output.splitlines()]
    rows = {words[0]: words for words in table if words[:1] in (["node"], ["node0"], ["node1"])}
    assert "SGLang" in rows["node"] and rows.keys() == {"node", "node0", "node1"}
    records = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "train/loss" in record]
    assert [record["weights/version"] for record in trained] == [1, 2, 3]
    # Its answers come from the weights of the trainer: both compute the same logprobs.
    assert all(record["logprob_diff/max"] < 1e-4 for record in trained)
    log = (run.run_dir / "logs" / "engine_0_server.log").read_text(errors="replace")
    assert "Prefill batch" in log
