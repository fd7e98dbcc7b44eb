"""Parallel sizes that rlscale accepts, compared with those that the installed SGLang accepts."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlscale.config.passthrough.sglang_python import find_python
from rlscale.engines.launch import ProcessPlace
from tests.contract.conftest import sglang_launch
from tests.engine_launches import HOST
from tests.engine_sizes import REFUSED, TP_SIZE, WORKING
from tests.tiny_model import write_tiny_qwen3_moe

SCRIPT = Path(__file__).with_name("resolve_sglang_args.py")

ACCEPTED_BY_SGLANG = {
    # Its server starts with these, and fails or hangs later.
    '{"pp_size": 0}': "it would have no stage",
    '{"pp_size": 3}': "3 stages do not divide the GPUs: one would be without work",
    '{"ep_size": 0}': "it would have no experts",
    '{"ep_size": -2}': "likewise",
    '{"ep_size": 3}': "SGLang divides the ranks by it",
    '{"ep_size": 16}': "likewise",
    '{"ep_size": 8, "pp_size": 2}': "likewise",
    '{"dp_size": 0}': "it would have no replica",
    '{"dp_size": 2}': "replicas, which it cannot update",
    '{"dp_size": 3}': "likewise",
    '{"enable_dp_attention": true}': "without a number of groups, it ignores the key",
    '{"enable_dp_attention": true, "dp_size": 1}': "likewise",
    '{"enable_dp_attention": 1}': "Python's 1 is true",
    '{"node_rank": 1}': "rlscale sets it",
    '{"dist_init_addr": "10.0.0.1:5000"}': "rlscale sets it",
}


@pytest.mark.slow
def test_sglang_accepts_what_rlscale_accepts(tmp_path: Path) -> None:
    model = write_tiny_qwen3_moe(tmp_path / "model")
    base = sglang_launch(model).arguments(ProcessPlace(host=HOST, port=20_000)) | {"tp_size": TP_SIZE}
    refused = [arguments for arguments, _, _ in REFUSED if None not in arguments.values()]
    further: list[dict[str, Any]] = [*WORKING, *refused]
    # A stage has the other GPUs; see SglangLaunch.
    sizes = [{**each, "tp_size": TP_SIZE // max(1, int(each.get("pp_size") or 1))} for each in further]
    command = [str(find_python(None)), str(SCRIPT), json.dumps(base), json.dumps(sizes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    errors = json.loads(done.stdout)
    assert errors[: len(WORKING)] == [None] * len(WORKING)
    accepted = [json.dumps(each) for each, error in zip(further, errors, strict=True) if error is None]
    assert accepted[len(WORKING) :] == list(ACCEPTED_BY_SGLANG)
