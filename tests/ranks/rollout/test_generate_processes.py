"""Generate functions in processes: what they do, and what becomes of a run if they crash, hang or never stop."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlscale.config import BatchConfig, RunConfig, SamplingConfig
from rlscale.errors import EngineError, WeightSyncError
from rlscale.plugins.args_view import Args
from rlscale.rewards.call_pool import PoolLimits
from rlscale.rollout.engine_pool import EnginePool
from rlscale.rollout.generate_process import ProcessGenerate
from rlscale.rollout.generate_session import GenerateSession
from rlscale.rollout.generate_values import GenerateSpec
from rlscale.rollout.loop_watch import LoopWatch
from rlscale.trajectory import Trajectory
from rlscale.types import EngineAddress, FailureCause, Generation, Prompt, SampleStatus, SamplingParams

MODULE = '''
import asyncio
import ctypes
import os
import pathlib
import sys
import threading
import time

import numpy as np

from rlscale.errors import EngineError


async def generate(trajectory, session):
    """Does what its prompt says."""
    answer = await session.generate(trajectory.token_ids())
    await ACTIONS.get(trajectory.prompt.text, finish)(trajectory, session)
    trajectory.add_generation(answer)


def generate_plainly(trajectory, session):
    if trajectory.prompt.text == "spin":
        while True:
            pass
    trajectory.add_generation(asyncio.run(session.generate(trajectory.token_ids())))
    trajectory.metadata["pid"] = os.getpid()


async def finish(trajectory, session):
    trajectory.metadata["pid"] = os.getpid()


async def exit_at_once(trajectory, session):
    os._exit(5)


async def crash(trajectory, session):
    ctypes.string_at(0)


async def leave(trajectory, session):
    sys.exit("bye")


async def interrupt(trajectory, session):
    raise KeyboardInterrupt


async def spin(trajectory, session):
    while True:
        pass


async def sleep(trajectory, session):
    if mark := trajectory.metadata.get("mark"):
        pathlib.Path(mark).touch()
    await asyncio.sleep(600)


async def huge(trajectory, session):
    trajectory.reward = 10**400


async def shout(trajectory, session):
    for _ in range(40):
        print("a" * 100_000)
    trajectory.metadata["printed"] = True


async def keep_object(trajectory, session):
    trajectory.metadata["lock"] = threading.Lock()


async def keep_numbers(trajectory, session):
    trajectory.metadata |= {"array": np.arange(3), "pair": (1, 2.5), "big": 10**30, "none": None}
    trajectory.reward = np.float32(0.5)


async def fork(trajectory, session):
    if child := os.fork():
        os.waitpid(child, 0)
        trajectory.metadata["parent"] = True


async def catch(trajectory, session):
    try:
        await session.generate([1, 666])
    except EngineError as error:
        trajectory.metadata["caught"] = str(error)


async def give_up(trajectory, session):
    try:
        await asyncio.wait_for(session.generate([1, 777]), 0.2)
    except TimeoutError:
        trajectory.metadata["gave_up"] = True


async def wait_for_end(trajectory, session):
    while not session.is_stopped:
        await asyncio.sleep(0.01)
    trajectory.metadata["stopped"] = True


ACTIONS = {
    "exit": exit_at_once, "crash": crash, "leave": leave, "interrupt": interrupt, "spin": spin, "sleep": sleep,
    "huge": huge, "shout": shout, "object": keep_object, "numbers": keep_numbers, "fork": fork, "catch": catch,
    "give_up": give_up, "wait": wait_for_end,
}


async def tree(trajectory, session):
    """Two branches after the output of a tool, by their own parameters."""
    from dataclasses import replace

    trajectory.add_generation(await session.generate(trajectory.token_ids()))
    trajectory.extend([8, 9], text="tool")
    short = replace(session.params, max_new_tokens=1, stop=("x",), temperature=0.5)
    for _ in range(2):
        trajectory.add_generation(await session.generate(trajectory.token_ids(1), short), parent=1)
    trajectory.metadata["seed"] = session.params.sampling_seed


async def slime(args, sample, sampling_params):
    from rlscale.plugins.slime_requests import post

    sample.tokens = list(sample.tokens) or [1, 2]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"input_ids": sample.tokens, "sampling_params": sampling_params})
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args, tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs], meta_info=output["meta_info"],
        text=output["text"],
    )
    sample.num_calls = args.bonus
    return sample
'''


class Engines:
    """A pool that answers each request with three tokens of version 4, unless its last token says otherwise."""

    present = (SimpleNamespace(address=EngineAddress(name="engine 0", url="http://127.0.0.1:9")),)
    models = gateway = None

    def __init__(self) -> None:
        self.requests: list[tuple[str, list[int], SamplingParams]] = []
        self.cancelled = asyncio.Event()
        self.finish_reason = "stop"

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, n: int, rid: str, **options: Any
    ) -> list[Generation]:
        self.requests.append((rid, list(token_ids), params))
        if token_ids[-1] == 666:
            raise EngineError("engine 0 refused")
        if token_ids[-1] == 777:
            try:
                await asyncio.sleep(600)
            finally:
                self.cancelled.set()
        if token_ids[-1] == 888:
            raise WeightSyncError("engine 0 has other weights")
        number = min(3, params.max_new_tokens)
        return [
            Generation(
                output_ids=[5] * number,
                logprobs=[-0.1] * number,
                weight_versions=[4] * number,
                finish_reason=self.finish_reason,
                text="5" * number,
                engine="engine 0",
            )
        ]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "functions.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


@contextmanager
def processes(
    name: str = "generate", *, timeout_s: float = 60.0, max_turns: int | None = None
) -> Iterator[ProcessGenerate]:
    limits = PoolLimits(timeout_s=timeout_s, cancel_grace_s=0.5, max_suspect_workers=2)
    generate = ProcessGenerate(GenerateSpec(path=f"functions:{name}"), limits, max_turns=max_turns)
    try:
        yield generate
    finally:
        generate.close()


def trajectory_of(number: int, text: str = "", last: int = 2) -> Trajectory:
    prompt = Prompt(index=number, text=text, token_ids=(1, last))
    return Trajectory(id=number, group_index=0, prompt=prompt, seed=number)


def session_of(engines: Engines, number: int = 0) -> GenerateSession:
    params = SamplingParams(max_new_tokens=10, sampling_seed=7)
    return GenerateSession(params=params, rid=f"train-{number}", pool=cast(EnginePool, engines), versions=(4, 4))


async def run(generate: ProcessGenerate, texts: Sequence[str]) -> list[tuple[Trajectory, str | None]]:
    engines, trajectories = Engines(), [trajectory_of(number, text) for number, text in enumerate(texts)]
    failures = await asyncio.gather(*[generate(each, session_of(engines, each.id)) for each in trajectories])
    assert all(each is None or each.cause == FailureCause.controller for each in failures)
    return [(t, None if f is None else f.message) for t, f in zip(trajectories, failures, strict=True)]


async def test_what_user_code_does_is_a_failure_of_its_trajectory_alone() -> None:
    texts = ["", "exit", "crash", "leave", "interrupt", "huge", "object", "numbers", "shout", "fork", "catch", ""]
    with processes() as generate:
        found = dict(zip(enumerate(texts), await run(generate, texts), strict=True))
        by_name = {text: message for (_, text), (_, message) in found.items()}
        assert by_name["exit"] == "generate of trajectory 1 (prompt row 2) failed: its process exited with code 5"
        assert "ended by SIGSEGV (functions.py:" in str(by_name["crash"])
        assert "functions.py:" in str(by_name["leave"]) and "SystemExit: bye" in str(by_name["leave"])
        assert "KeyboardInterrupt" in str(by_name["interrupt"])
        assert "set a reward that must be a finite number" in str(by_name["huge"])
        assert "trajectory.metadata['lock'] must be a value of JSON" in str(by_name["object"])
        good = {text: trajectory for (_, text), (trajectory, message) in found.items() if message is None}
        assert good.keys() == {"", "numbers", "shout", "fork", "catch"}
        assert all(each.status == SampleStatus.completed and each.num_sampled == 3 for each in good.values())
        numbers = good["numbers"]
        assert numbers.metadata == {"array": [0, 1, 2], "pair": [1, 2.5], "big": 10**30, "none": None}
        assert numbers.reward == 0.5
        assert good["shout"].metadata == {"printed": True} and good["fork"].metadata == {"parent": True}
        assert good["catch"].metadata == {"caught": "engine 0 refused"}
        assert good[""].metadata["pid"] != os.getpid()


async def test_a_blocked_event_loop_is_reported_and_ends_at_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    with processes(timeout_s=1.5) as generate:
        generate._watch = LoopWatch(generate._pool, every_s=0.5)
        found = await run(generate, ["", "spin", "sleep"])
        messages = {each.prompt.text: message for each, message in found}
        late = "failed: did not return within sampling.generate_timeout_s=1.5 (functions.py:"
        assert messages[""] is None
        assert late in str(messages["spin"]) and "in spin)" in str(messages["spin"])
        assert late in str(messages["sleep"]) and "in sleep)" in str(messages["sleep"])
        assert "a generate function blocks the event loop of " in caplog.text
        assert "in spin); await what takes long" in caplog.text
        # The row is known: it harms no other trajectory.
        engines, other = Engines(), Engines()
        again = asyncio.ensure_future(generate(trajectory_of(1, "spin"), session_of(engines)))
        assert await generate(trajectory_of(0), session_of(other)) is None
        assert "did not return" in getattr(await again, "message", "")
        assert len(other.requests) == len(engines.requests) == 1


@pytest.mark.nightly
async def test_a_plain_function_that_never_returns_costs_its_process_and_no_other_trajectory() -> None:
    with processes("generate_plainly", timeout_s=2.0) as generate:
        found = await run(generate, ["", "spin", ""])
        assert [message is None for _, message in found] == [True, False, True]
        (again, message), *_ = await run(generate, [""])
        assert message is None and again.metadata["pid"] != found[0][0].metadata["pid"]


async def test_a_tree_has_the_tokens_and_parameters_of_its_requests() -> None:
    engines, trajectory = Engines(), trajectory_of(3)
    with processes("tree") as generate:
        assert await generate(trajectory, session_of(engines)) is None
    first, second = trajectory.samples()
    assert first.tokens.tolist() == second.tokens.tolist() == [1, 2, 5, 5, 5, 8, 9, 5]
    assert first.loss_mask.tolist() == [1, 1, 1, 0, 0, 1] and second.loss_mask.tolist() == [0, 0, 0, 0, 0, 1]
    assert first.weight_versions.tolist() == [4] * 6 and first.response == "555tool5"
    assert first.rollout_logprobs[0] == pytest.approx(-0.1)
    assert [rid for rid, _, _ in engines.requests] == ["train-0-1", "train-0-2", "train-0-3"]
    params = engines.requests[1][2]
    assert params == replace(engines.requests[0][2], max_new_tokens=1, stop=("x",), temperature=0.5)
    assert trajectory.metadata == {"seed": 7} and trajectory.turns[0].interval_s is not None


async def test_a_function_of_slime_continues_an_aborted_trajectory_with_exact_versions() -> None:
    engines, trajectory = Engines(), trajectory_of(0)
    engines.finish_reason = "abort"
    spec = GenerateSpec(path="functions:slime", args=Args(partial_run(), runtime={}))
    generate = ProcessGenerate(spec, PoolLimits())
    try:
        session = session_of(engines)
        assert await generate(trajectory, session) is None
        assert trajectory.status == SampleStatus.aborted and trajectory.token_ids() == [1, 2, 5, 5, 5]
        engines.finish_reason = "stop"
        assert await generate(trajectory, session) is None
    finally:
        generate.close()
    assert trajectory.status == SampleStatus.completed
    assert trajectory.token_ids() == [1, 2, *[5] * 6] and trajectory.versions == {4}
    assert [params.max_new_tokens for _, _, params in engines.requests] == [10, 7]
    assert trajectory.samples()[0].metadata["document_attributes"] == {"num_calls": 3}


def partial_run() -> RunConfig:
    batch = BatchConfig(rollout_batch_size=1, n_samples_per_prompt=1)
    return RunConfig(batch=batch, sampling=SamplingConfig(partial_rollout=True), custom={"bonus": 3})


async def test_limits_and_ends_reach_the_function(tmp_path: Path) -> None:
    engines = Engines()
    with processes(max_turns=1) as generate:
        trajectory = trajectory_of(0, "catch")
        assert await generate(trajectory, session_of(engines)) is None
        assert "caught" not in trajectory.metadata and len(engines.requests) == 1, "the second turn is empty"
        assert await generate(trajectory_of(1, "give_up"), session_of(engines)) is None
    with processes() as generate:
        trajectory = trajectory_of(2, "give_up")
        assert await generate(trajectory, session_of(engines)) is None
        assert trajectory.metadata == {"gave_up": True}
        await asyncio.wait_for(engines.cancelled.wait(), 10)
        session, waiting = session_of(engines), trajectory_of(3, "wait")
        call = asyncio.ensure_future(generate(waiting, session))
        while len(engines.requests) < 4:
            await asyncio.sleep(0.01)
        session.stopped.set()
        assert await call is None and waiting.metadata == {"stopped": True}
        failure = await generate(trajectory_of(4, last=666), session)
        assert failure is None, "a rollout that has ended aborts"
        failure = await generate(trajectory_of(5, last=666), session_of(engines))
        assert failure is not None and failure.cause == FailureCause.model_server
        with pytest.raises(WeightSyncError, match="other weights"):
            await generate(trajectory_of(6, last=888), session_of(engines))
        # A caller that is cancelled ends its call.
        sleeping = trajectory_of(7, "sleep")
        sleeping.metadata["mark"] = str(tmp_path / "running")
        call = asyncio.ensure_future(generate(sleeping, session_of(engines)))
        while not (tmp_path / "running").exists():
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await generate(trajectory_of(8), session_of(engines)) is None
