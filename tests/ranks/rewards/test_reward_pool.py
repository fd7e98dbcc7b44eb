"""User code in processes: what it does to its process is a failure of one sample."""

import asyncio
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from rlscale.config import RewardConfig, RewardType, load_config
from rlscale.errors import RewardError
from rlscale.plugins.args_view import Args
from rlscale.rewards import PoolLimits, RewardFunctions, RewardRunner, RewardSpec, prepare_reward
from rlscale.rewards.builtin import exact_match
from rlscale.rewards.call_process import CallProcess
from rlscale.rewards.reward_runner import MAX_FIRST_FAILURES
from rlscale.rewards.waiting_rewards import WaitingRewards
from rlscale.types import Failure, Sample

MODULE = """
import asyncio, ctypes, os, signal, sys, time

STARTED = []

def score(sample):
    kind = sample.response
    if kind == "exit": sys.exit(3)
    if kind == "interrupt": raise KeyboardInterrupt
    if kind == "_exit": os._exit(5)
    if kind == "segfault": ctypes.string_at(0)
    if kind == "loop":
        while True: pass
    if kind == "sleep": time.sleep(1000)
    if kind == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "just late": time.sleep(1.1)
    if kind == "fork":
        os.fork()
        return 2.0
    if kind == "fork and exit":
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(7)
    if kind == "close all": os.closerange(0, 5000)
    if kind == "close output":
        sys.stdout.close()
        os.close(2)
    if kind == "big": return 10**400
    if kind == "print":
        for _ in range(30_000): print("x" * 100)
        sys.stderr.write("y\\n" * 500_000)
        return 4.0
    if kind == "nan": return float("nan")
    if kind == "text": return "1"
    if kind == "raise": raise ValueError("no such unit")
    if kind == "metadata":
        sample.metadata["seen"] = {"words": [1, 2]}
        sample.metadata["not json"] = object()
        return 0.5
    if kind == "returned coroutine": return asyncio.sleep(0, 3.0)
    if kind == "own loop": return asyncio.run(asyncio.sleep(0, 6.0))
    if kind == "flaky":
        path = f"{sample.metadata['folder']}/attempts"
        with open(path, "a") as file: file.write("x")
        if os.path.getsize(path) < 3: raise ConnectionError("try again")
        return 5.0
    if kind == "started":
        open(f"{sample.metadata['folder']}/started", "w").write(str(os.getpid()))
        time.sleep(1000)
    return 1.0

async def later(sample):
    kind = sample.response
    if kind == "wait": await asyncio.sleep(1000)
    if kind == "block": time.sleep(2000)
    if kind == "stubborn":
        while True:
            try: await asyncio.sleep(1000)
            except asyncio.CancelledError: pass
    if kind == "together":
        STARTED.append(sample)
        while len(STARTED) < 1000: await asyncio.sleep(0.01)
        return float(len(STARTED))
    await asyncio.sleep(0)
    return score(sample)

def of_group(samples):
    best = max(len(sample.response) for sample in samples)
    samples[0].metadata["best"] = best
    return [float(len(sample.response) == best) for sample in samples]

async def of_document_group(args, samples, **kwargs):
    return [len(sample.response) + args.rollout_batch_size for sample in samples]

def of_wrong_group(samples):
    return [1.0] * len(samples) if samples[0].response == "good" else [1.0]

def partly(samples):
    return [float("nan") if sample.response == "bad" else 1.0 for sample in samples]

def counted(sample):
    STARTED.append(sample)
    return {"calls": len(STARTED)}

async def slow(sample):
    await asyncio.sleep(1000)

def with_values(sample, custom):
    return custom["bonus"]

def never(sample):
    raise RuntimeError("not today")
"""


def place(text: str, function: str = "score") -> str:
    """The place of the first line with `text`."""
    line = next(i for i, line in enumerate(MODULE.splitlines(), start=1) if text in line)
    return f"(rewards_of_test.py:{line} in {function})"


LATE = "did not return within reward.timeout_s=2"
OUTCOMES = {
    "good": 1.0,
    "exit": f"failed: SystemExit: 3 {place('sys.exit(3)')}",
    "interrupt": f"failed: KeyboardInterrupt {place('raise KeyboardInterrupt')}",
    "_exit": "failed: its process exited with code 5",
    "segfault": f"failed: its process was ended by SIGSEGV {place('string_at')}",
    "loop": f"{LATE} {place('while True: pass')}",
    "sleep": f"{LATE} {place('time.sleep')}",
    "stop": LATE,
    "fork": 2.0,
    "fork and exit": "failed: its process exited with code 7",
    "close all": "failed: its process ended",
    "close output": 1.0,
    "big": f"must be a finite number, got 1{'0' * 79}...; return a float from the reward",
    "print": 4.0,
    "nan": "must be a finite number, got nan; return a float from the reward",
    "text": "must be a finite number, got '1'; return a float from the reward",
    "raise": f"failed: ValueError: no such unit {place('raise ValueError')}",
    "metadata": 0.5,
    "own loop": 6.0,
    "returned coroutine": 3.0,
    "last": 1.0,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rewards_of_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def open_runner(
    name: str, *, timeout_s: float = 600.0, max_retries: int = 0, max_workers: int = 2
) -> Iterator[RewardRunner]:
    spec = RewardSpec(config=RewardConfig(custom_path=f"rewards_of_test:{name}"), custom={"bonus": 4.5})
    limits = PoolLimits(max_workers=max_workers, timeout_s=timeout_s, cancel_grace_s=0.5)
    with RewardRunner(spec, limits=limits, max_retries=max_retries, backoff_s=0.01) as runner:
        yield runner


def outcomes(samples: Sequence[Sample], failures: dict[int, Failure]) -> dict[str, float | str | None]:
    """Reward, or the end of the message, by response."""
    found: dict[str, float | str | None] = {}
    for sample in samples:
        failure = failures.get(sample.index)
        assert (failure is None) == (sample.reward is not None)
        if failure is None:
            found[sample.response] = sample.reward
            continue
        message = failure.message.split(f"{sample.response!r}) ")[1]
        # Without a channel a process ends by itself, with 120 if Python cannot flush its output, or the run ends it.
        is_raced = sample.response == "close all"
        found[sample.response] = (
            re.sub("exited with code (1|120)$|was ended by SIGKILL", "ended", message) if is_raced else message
        )
    return found


def test_all_that_user_code_does_concerns_its_sample_alone(folder: Path, make_sample: Callable[..., Sample]) -> None:
    samples = [make_sample(kind, index=i) for i, kind in enumerate(OUTCOMES)]
    with open_runner("score", timeout_s=2) as runner:
        failures = asyncio.run(runner.score(samples))
    assert outcomes(samples, failures) == OUTCOMES
    assert samples[list(OUTCOMES).index("metadata")].metadata == {"seen": {"words": [1, 2]}}


def test_a_reply_right_after_the_deadline_costs_no_other_call(
    folder: Path, make_sample: Callable[..., Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_for_reply(process: CallProcess) -> str:
        late = set(process.calls)
        while late & process.calls:
            await asyncio.sleep(0.01)
        return ""

    monkeypatch.setattr(CallProcess, "stack_place", wait_for_reply)
    samples = [make_sample("just late", index=i) for i in range(2)]
    with open_runner("score", timeout_s=1, max_workers=1) as runner:
        assert asyncio.run(runner.score(samples)) == {}


def test_a_reward_that_closes_its_output_silences_no_other_sample(
    folder: Path, make_sample: Callable[..., Sample], capfd: pytest.CaptureFixture[str]
) -> None:
    samples = [make_sample(kind, index=i) for i, kind in enumerate(["close output", "print"])]
    with open_runner("score", max_workers=1) as runner:
        assert asyncio.run(runner.score(samples)) == {}
    assert "x" * 100 in capfd.readouterr().err


def test_an_async_reward_that_fails_costs_no_other_sample(folder: Path, make_sample: Callable[..., Sample]) -> None:
    kinds = ["good", "wait", "exit", "stubborn", "raise", "_exit", "fork", "block", "last"]
    samples = [make_sample(kind, index=i) for i, kind in enumerate(kinds)]
    with open_runner("later", timeout_s=2) as runner:
        failures = asyncio.run(runner.score(samples))
    expected = {kind: OUTCOMES.get(kind, 1.0) for kind in kinds} | {
        "wait": f"{LATE} {place('await asyncio.sleep(1000)', 'later')}",
        "stubborn": f"{LATE} {place('try: await', 'later')}",
        "block": f"{LATE} {place('time.sleep(2000)', 'later')}",
    }
    assert outcomes(samples, failures) == expected


def test_a_thousand_async_rewards_run_at_once(folder: Path, make_sample: Callable[..., Sample]) -> None:
    # Each waits until all of them have started, so that it returns only if they run concurrently.
    samples = [make_sample("together", index=i) for i in range(1000)]
    with open_runner("later") as runner:
        assert asyncio.run(runner.score(samples)) == {}
    assert {sample.reward for sample in samples} == {1000.0}


def test_a_failed_reward_is_repeated_on_the_same_answer(folder: Path, make_sample: Callable[..., Sample]) -> None:
    sample = make_sample("flaky")
    sample.metadata["folder"] = str(folder)
    with open_runner("score", max_retries=1) as runner:
        assert "ConnectionError: try again" in asyncio.run(runner.score([sample]))[0].message
    (folder / "attempts").unlink()
    with open_runner("score", max_retries=2) as runner:
        assert asyncio.run(runner.score([sample])) == {}
    assert sample.reward == 5.0


def test_the_report_of_waiting_rewards_gets_each_failure_before_the_last(
    folder: Path, make_sample: Callable[..., Sample]
) -> None:
    noted = list[str]()

    class Noting(WaitingRewards):
        def note_retry(self, failure: str) -> None:
            noted.append(failure)

    sample = make_sample("flaky")
    sample.metadata["folder"] = str(folder)
    with open_runner("score", max_retries=1) as runner:
        runner._waiting = Noting()
        (failure,) = asyncio.run(runner.score([sample])).values()
    assert len(noted) == 1 and noted[0].startswith("failed: ConnectionError: try again")
    assert failure.message.endswith(noted[0]), "both calls failed in the same way"


def test_only_the_function_that_failed_is_repeated(folder: Path, make_sample: Callable[..., Sample]) -> None:
    config = RewardConfig(functions={name: f"rewards_of_test:{name}" for name in ("score", "counted", "slow")})
    named = {name: RewardSpec(config=config, name=name) for name in config.functions}
    sample = make_sample("flaky", label="flaky")
    sample.metadata["folder"] = str(folder)
    weights = {"equal": 1.0, "score": 1.0, "counted/calls": 10.0}
    # `score` works at its third call, and without retries the sample has failed; `slow` never returns.
    reward = RewardFunctions(functions={"equal": exact_match, **named})
    with RewardRunner(reward, limits=PoolLimits(timeout_s=2), max_retries=0, weights=weights) as runner:
        (failure,) = asyncio.run(runner.score([sample])).values()
        assert failure.message.startswith("reward score of sample 0 ") and "try again" in failure.message
        assert sample.reward is None
    (folder / "attempts").unlink()
    del named["slow"]
    reward = RewardFunctions(functions={"equal": exact_match, **named})
    with RewardRunner(reward, backoff_s=0.01, weights=weights) as runner:
        assert asyncio.run(runner.score([sample])) == {}
    assert sample.reward == 1.0 + 5.0 + 10.0
    assert sample.metadata["rewards"] == {"equal": 1.0, "score": 5.0, "counted/calls": 1}


def test_the_process_gets_the_values_of_custom(folder: Path, make_sample: Callable[..., Sample]) -> None:
    sample = make_sample("a")
    with open_runner("with_values") as runner:
        assert asyncio.run(runner.score([sample])) == {}
    assert sample.reward == 4.5


def score_group(name: str, samples: Sequence[Sample], *, args: Args | None = None) -> dict[int, Failure]:
    spec = RewardSpec(config=RewardConfig(custom_path=f"rewards_of_test:{name}", group=True), args=args)
    with RewardRunner(spec, max_retries=0) as runner:
        return asyncio.run(runner.score(samples))


def test_a_reward_of_groups_gets_all_samples_of_a_group(folder: Path, make_sample: Callable[..., Sample]) -> None:
    samples = [make_sample("x" * (i % 3), index=i) for i in range(5)]
    assert score_group("of_group", samples) == {}
    assert [sample.reward for sample in samples] == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert samples[0].metadata == {"best": 2}
    config = load_config(["batch.rollout_batch_size=10"])
    assert score_group("of_document_group", samples, args=Args(config)) == {}
    assert [sample.reward for sample in samples] == [10.0, 11.0, 12.0, 10.0, 11.0]


def test_a_wrong_list_of_a_group_is_a_failure_of_its_samples(folder: Path, make_sample: Callable[..., Sample]) -> None:
    samples = [make_sample("a", index=i) for i in range(2)]
    failures = score_group("of_wrong_group", samples)
    message = "must be a list of 2 numbers, one for each sample of the group, got 1 entries: [1.0]"
    assert len(failures) == 2 and all(message in each.message for each in failures.values())
    mixed = [make_sample("good", index=0), make_sample("bad", index=1)]
    assert list(score_group("partly", mixed)) == [1]
    assert (mixed[0].reward, mixed[1].reward) == (1.0, None)


def test_the_remote_reward_runs_in_a_process_and_is_repeated(make_sample: Callable[..., Sample]) -> None:
    sizes: list[int] = []

    async def grade(request: web.Request) -> web.Response:
        sizes.append(len(await request.json()))
        if len(sizes) <= 2:
            return web.Response(status=503)
        answers = [each["response"] for each in await request.json()]
        return web.json_response([{"score": len(each), "words": 1} for each in answers])

    async def score_all(samples: Sequence[Sample]) -> dict[int, Failure]:
        app = web.Application()
        app.router.add_post("/", grade)
        server = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await server.setup()
        await web.TCPSite(server, "127.0.0.1", 0).start()
        config = RewardConfig(
            type=RewardType.remote_rm, url=f"http://127.0.0.1:{server.addresses[0][1]}", batch_size=8, key="score"
        )
        spec = prepare_reward(config)
        assert isinstance(spec, RewardSpec)
        try:
            with RewardRunner(spec, backoff_s=0.01) as runner:
                return await runner.score(samples, key="score")
        finally:
            await server.cleanup()

    samples = [make_sample("x" * i, index=i) for i in range(30)]
    assert asyncio.run(score_all(samples)) == {}
    assert [sample.reward for sample in samples] == list(range(30))
    assert samples[3].metadata["rewards"] == {"score": 3, "words": 1}
    # The samples of the two failed requests are sent again, and no others.
    assert max(sizes) == 8 and sum(sizes) == len(samples) + sum(sizes[:2])


def test_a_late_reward_server_is_named(make_sample: Callable[..., Sample]) -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.json_response(1)

    async def score() -> str:
        app = web.Application()
        app.router.add_post("/", hang)
        server = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await server.setup()
        await web.TCPSite(server, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{server.addresses[0][1]}"
        spec = prepare_reward(RewardConfig(type=RewardType.remote_rm, url=url, timeout_s=2))
        try:
            with RewardRunner(spec, limits=PoolLimits(timeout_s=2), max_retries=0) as runner:
                failures = await runner.score([make_sample("x")])
        finally:
            await server.cleanup()
        return failures[0].message.replace(url, "URL")

    assert "the reward server URL did not answer within reward.timeout_s=2" in asyncio.run(score())


def test_a_reward_that_never_works_stops_the_run(folder: Path, make_sample: Callable[..., Sample]) -> None:
    samples = [make_sample("a", index=i) for i in range(MAX_FIRST_FAILURES)]
    with (
        open_runner("never") as runner,
        pytest.raises(RewardError, match=r"not today \(rewards_of_test\.py:\d+ in never"),
    ):
        asyncio.run(runner.score(samples))


def test_a_module_that_fails_in_the_process_is_reported(folder: Path, make_sample: Callable[..., Sample]) -> None:
    (folder / "rewards_of_test.py").write_text("raise ImportError('not on this machine')")
    with open_runner("score") as runner:
        failures = asyncio.run(runner.score([make_sample("a")]))
    assert "loading it failed: " in failures[0].message and "not on this machine" in failures[0].message


def test_closing_does_not_wait_for_user_code(folder: Path, make_sample: Callable[..., Sample]) -> None:
    sample = make_sample("started")
    sample.metadata["folder"] = str(folder)

    async def start_and_leave() -> None:
        with open_runner("score") as runner:
            scoring = asyncio.create_task(runner.score([sample]))
            while not (folder / "started").exists() or not (folder / "started").read_text():
                await asyncio.sleep(0.01)
            scoring.cancel()

    asyncio.run(start_and_leave())
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "started").read_text()), 0)


def test_output_is_passed_on_up_to_a_limit(
    folder: Path, make_sample: Callable[..., Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    with open_runner("score") as runner:
        assert asyncio.run(runner.score([make_sample("print")])) == {}
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("xxxx")
    assert 900_000 < len(printed.err) < 1_100_000 and printed.err.endswith("the rest is dropped\n")


def test_processes_of_an_earlier_event_loop_are_replaced(folder: Path, make_sample: Callable[..., Sample]) -> None:
    with open_runner("score") as runner:
        for index in range(2):
            sample = make_sample("good", index=index)
            assert asyncio.run(runner.score([sample])) == {}
            assert sample.reward == 1.0


def test_no_torch_is_imported_into_the_process(folder: Path, make_sample: Callable[..., Sample]) -> None:
    (folder / "rewards_of_test.py").write_text("import sys\ndef score(sample):\n    return 'torch' in sys.modules")
    sample = make_sample("a")
    with open_runner("score") as runner:
        assert asyncio.run(runner.score([sample])) == {}
    assert sample.reward == 0.0
