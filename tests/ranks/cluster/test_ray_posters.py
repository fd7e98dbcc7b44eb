"""Processes that send the driver's requests. In a separate process: Ray of this one may belong to other tests."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio, os, re, signal, sys
from pathlib import Path
import ray
from rlscale.cluster.ray_posters import RayPosters
from rlscale.engines.client.http_engine import HttpEngine
from rlscale.engines.fake import FakeServer
from rlscale.errors import EngineError
from rlscale.types import EngineAddress, SamplingParams

LOGS, PARAMS = Path(sys.argv[1]), SamplingParams(max_new_tokens=3, sampling_seed=7)

async def check(fake, posters):
    direct = HttpEngine(EngineAddress(name="engine 0", url=fake.url), timeout_s=60)
    engine = HttpEngine(EngineAddress(name="engine 0", url=fake.url), timeout_s=60, post=posters.post)
    expected = await direct.generate([1, 2], PARAMS)
    answers = await asyncio.gather(*[engine.generate([1, 2], PARAMS) for _ in range(8)])
    assert answers == [expected] * 8, "the process that sends a request does not change its answer"
    pids = {int(re.search("process ([0-9]+) sends", path.read_text())[1]) for path in LOGS.glob("poster_*.log")}
    assert len(pids) == 2 and os.getpid() not in pids, pids
    os.kill(min(pids), signal.SIGKILL)
    answers = await asyncio.gather(*[engine.generate([1, 2], PARAMS) for _ in range(8)])
    assert answers == [expected] * 8, "Ray restarts a poster and repeats its requests"
    fake.faults.errors_next = 1
    try:
        await engine.generate([1, 2], PARAMS)
    except EngineError as error:
        assert "engine 0" in str(error) and "/generate" in str(error), error
    else:
        raise AssertionError("a refusal of the engine is an EngineError")
    await engine.close()
    await direct.close()

async def check_cancel(fake, posters):
    engine = HttpEngine(EngineAddress(name="engine 0", url=fake.url), timeout_s=600, post=posters.post)
    long = asyncio.create_task(engine.generate([1, 2], SamplingParams(max_new_tokens=200)))
    while not fake.service.load().running:
        await asyncio.sleep(0.01)
    long.cancel()
    while fake.service.load().running:
        await asyncio.sleep(0.01)
    await engine.close()

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
posters = RayPosters(num_per_node=8, log_folder=LOGS)
with FakeServer() as fake:
    asyncio.run(asyncio.wait_for(check(fake, posters), 120))
with FakeServer(token_s=5.0) as slow:
    asyncio.run(asyncio.wait_for(check_cancel(slow, posters), 60))
posters.kill()
ray.shutdown()
"""


def test_posters_send_requests_survive_a_kill_and_end_cancelled_requests(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
