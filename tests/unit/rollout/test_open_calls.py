"""Requests of user code in a separate process, on the side of the run."""

import asyncio
import gc
import warnings
from types import SimpleNamespace

from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_process import _OpenCall
from rlscale.rollout.generate_session import GenerateSession
from rlscale.trajectory import Trajectory
from rlscale.types import EngineAddress, Prompt, SamplingParams


async def test_a_request_that_is_cancelled_before_it_runs_leaves_no_coroutine() -> None:
    session = GenerateSession(
        params=SamplingParams(max_new_tokens=4),
        rid="r",
        pool=EnginePool([SimpleNamespace(address=EngineAddress(name="engine 0", url="http://engine"))]),  # type: ignore[list-item]
        versions=(0, 0),
        tokenizer=SimpleNamespace(eos_token_id=9),  # type: ignore[arg-type]
    )
    prompt = Prompt(index=0, text="1", token_ids=(5,))
    trajectory = Trajectory(id=0, group_index=0, prompt=prompt, seed=0)
    opened, process = _OpenCall(trajectory, session, max_turns=None), SimpleNamespace()
    gc.collect()  # what other tests left would be reported here
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        opened.start(process, 0, "generate", [[5], {}])  # type: ignore[arg-type]
        opened.close()  # its process ended
        for _ in range(3):  # the task is cancelled, and forgotten
            await asyncio.sleep(0)
        gc.collect()
    assert [str(each.message) for each in reported if each.category is RuntimeWarning] == []
