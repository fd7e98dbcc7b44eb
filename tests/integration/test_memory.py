"""Out-of-memory errors of a trainer and an engine name the config keys to change."""

import os
import re
import resource
import sys
from pathlib import Path

import pytest

from rlscale.config import load_config
from rlscale.control.oom_advice import with_memory_advice
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.ports import free_port
from rlscale.engines.process import EngineProcess
from rlscale.errors import EngineError
from rlscale.types import EngineAddress, SamplingParams
from tests.integration.conftest import Command
from tests.tiny_model import write_tiny_qwen3

pytestmark = pytest.mark.own_ray

LOSS = """
import torch

def loss(*arguments, **named):
    return torch.empty(2**60)
"""
# The cache of a long sequence is one block of 1 GiB, so it is the first allocation to exceed the limit.
CACHE_OPTIONS = ["--num-slots=4096", f"--max-cached-tokens={4096 * 512}"]
HEADROOM_BYTES = 256 << 20


@pytest.mark.nightly
def test_a_trainer_out_of_memory_names_the_keys_to_change(command: Command, tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(LOSS, encoding="utf-8")
    done = command.run("algo.loss_type=custom_loss", "algo.custom_loss_function_path=greedy:loss")
    assert done.code == 1, done.err
    assert "actor rank 0: RuntimeError" in done.err and "can't allocate memory" in done.err
    assert "lower batch.max_tokens_per_gpu (now 8192)" in done.err
    assert "Traceback" not in done.err


async def test_an_engine_out_of_memory_names_the_keys_to_change(tmp_path: Path) -> None:
    model = write_tiny_qwen3(tmp_path / "model")
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "rlscale.cli.serve", f"--model-path={model}", f"--port={port}", "--device=cpu"]
    command += CACHE_OPTIONS
    process = EngineProcess(command, name="engine 0", url=url, env=os.environ, log_path=tmp_path / "engine.log")
    process.start()
    try:
        process.wait_ready(60)
        assert process.pid is not None
        size = re.search(r"VmSize:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        assert size is not None
        limit = int(size[1]) * 1024 + HEADROOM_BYTES
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
        engine = HttpEngine(EngineAddress(name="engine 0", url=url), timeout_s=60)
        with pytest.raises(EngineError) as caught:
            await engine.generate([5, 6, 7], SamplingParams(max_new_tokens=500), n=64)
        await engine.close()
    finally:
        process.stop()
    advised = str(with_memory_advice(caught.value, load_config(["rollout.max_context_len=512"])))
    assert "lower rollout.num_slots (now 128), or lower rollout.max_context_len (now 512)" in advised, advised
