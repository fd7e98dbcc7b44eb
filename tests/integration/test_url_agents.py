"""Runs whose agents know only a URL: frameworks, faults, interrupts and kills."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from rlscale.crashtest.check_ledger import check_ledger, read_ledger
from tests.integration.conftest import REWARDED, Command
from tests.integration.test_crash import run_crashtest
from tests.integration.test_faults import wait_until

FRAMEWORKS = Path(__file__).parents[1] / "framework_agents"

ENGINE_LOG = '''
import json
from pathlib import Path


class EngineLog:
    """Writes each request to an engine with its answer into a file."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/generate":
            await self.app(scope, receive, send)
            return
        question, answer = bytearray(), bytearray()

        async def receive_and_keep():
            message = await receive()
            question.extend(message.get("body", b""))
            return message

        async def send_and_keep(message):
            answer.extend(message.get("body", b""))
            await send(message)

        await self.app(scope, receive_and_keep, send_and_keep)
        given, found = json.loads(question), json.loads(answer)
        for each in found if isinstance(found, list) else [found]:
            logprobs, ids, _ = zip(*each["meta_info"]["output_token_logprobs"])
            entry = {"input": given["input_ids"], "output": ids, "logprobs": logprobs}
            with Path("engine_log.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\\n")
'''


def sampled_turns(
    sample: dict[str, list[float]],
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[np.float32, ...]]]:
    """The trained turns of a sample: ids before it, its ids and logprobs in the precision of samples."""
    tokens, mask, logprobs = sample["tokens"], sample["loss_mask"], sample["rollout_logprobs"]
    first, turns, start = len(tokens) - len(mask), [], None
    for place, value in enumerate([*mask, 0]):
        if value and start is None:
            start = place
        elif not value and start is not None:
            own = tuple(int(each) for each in tokens[first + start : first + place])
            before = tuple(int(each) for each in tokens[: first + start])
            turns.append((before, own, tuple(np.float32(each) for each in logprobs[start:place])))
            start = None
    return turns


@pytest.mark.slow
@pytest.mark.own_ray
def test_agents_of_three_frameworks_train_with_the_tokens_of_the_engine(command: Command) -> None:
    (command.folder / "engine_log.py").write_text(ENGINE_LOG)
    done = command.run(
        REWARDED,
        "model=tiny_qwen3_agent",
        # The system prompt of smolagents has 3,400 characters, which are tokens of this model.
        "model.max_position_embeddings=8192",
        "data.num_rollout=2",
        "batch.rollout_batch_size=1",
        "batch.n_samples_per_prompt=4",
        "rollout.max_response_len=96",
        "eval.prompt_data=null",
        "eval.interval=null",
        f'agent.command=[python,"{FRAMEWORKS}/any_framework.py"]',
        "agent.max_turns=4",
        "router.enabled=true",
        "router.use_middleware_router=true",
        'router.middleware_paths=["engine_log:EngineLog"]',
        'debug.save_rollout_data="dumps/{rollout_id}.jsonl"',
        timeout_s=1200,
    )
    assert done.code == 0, done.err
    steps = [record for record in command.metrics() if "train/loss" in record]
    assert len(steps) == 2 and all(step["train/grad_norm"] > 0 for step in steps)
    assert max(step["logprob_diff/max"] for step in steps) < 1e-4
    lines = (command.folder / "engine_log.jsonl").read_text().splitlines()
    engine = {
        (tuple(each["input"]), tuple(each["output"]), tuple(np.float32(value) for value in each["logprobs"]))
        for each in map(json.loads, lines)
    }
    samples = [
        json.loads(line)
        for number in range(2)
        for line in (command.folder / "dumps" / f"{number}.jsonl").read_text().splitlines()
    ]
    turns = [turn for sample in samples for turn in sampled_turns(sample)]
    assert turns and set(turns) <= engine
    assert {sample["sample_index"] % 4 for sample in samples if sample["status"] != "failed"} == {0, 1, 2, 3}
    logs = "".join(path.read_text() for path in (command.run_dir / "agents").rglob("*.log"))
    names = ("openai_agents_program", "pydantic_ai_program", "smolagents_program", "framework_agent")
    assert all(f"framework: {name}\n" in logs for name in names)
    assert check_ledger(command.run_dir / "ledger.jsonl", command.folder / "dumps") == []


FAULTY = """
import http.client, json, os, signal, sys, time
from pathlib import Path
from urllib.parse import urlsplit

task = json.load(open(sys.argv[1]))
first = Path(sys.argv[2], f"{task['id']}.txt")
is_first = not first.exists()
first.write_text("tried")


def post(body, num_retries=0):
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    # As OpenAI's client does. Without it a call whose answer was lost with the gateway would be a second turn.
    headers["X-Stainless-Retry-Count"] = str(num_retries)
    connection.request("POST", url.path + "/chat/completions", body, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def chat(messages):
    for num_retries in range(100):
        try:
            status, answer = post(json.dumps({"model": "policy", "messages": messages, "max_tokens": 4}), num_retries)
        except (OSError, http.client.HTTPException):
            time.sleep(0.2)  # the gateway is being restarted
            continue
        if status == 200:
            return answer["choices"][0]["message"]
        raise SystemExit(f"status {status}: {answer}")


messages = task["messages"]
messages = [*messages, chat(messages), {"role": "user", "content": "1+1="}]
fault = task["id"] % 8
if task["id"] == 1 and is_first:
    time.sleep(600)
elif fault == 2 and is_first:
    sys.exit(3)
elif fault == 3:
    assert post("{")[0] == 400
elif fault == 4:
    status, _ = post(json.dumps({"model": "policy", "messages": [{"role": "user", "content": "1" * 10_000_000}]}))
    assert 400 <= status < 500, status
elif fault == 5 and is_first:
    os.kill(os.getpid(), signal.SIGKILL)
elif task["id"] == 6:
    raise RuntimeError("it never works")
elif task["id"] == 16:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, marked = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"serve_gateway" in words and os.environ["RLSCALE_TEST_MARK"].encode() in marked:
            os.kill(int(folder.name), signal.SIGKILL)
messages = [*messages, chat(messages)]
json.dump({"reward": float(task["id"] % 2)}, open(os.environ["RLSCALE_RESULT"], "w"))
"""


@pytest.mark.nightly
def test_faulty_agents_and_a_killed_gateway_lose_and_repeat_nothing(command: Command) -> None:
    (command.folder / "faulty.py").write_text(FAULTY)
    tries = command.folder / "tries"
    tries.mkdir()
    done = command.run(
        "data.num_rollout=3",
        "batch.n_samples_per_prompt=4",
        "rollout.max_response_len=8",
        "eval.prompt_data=null",
        "eval.interval=null",
        f'agent.command=[python,faulty.py,"{{task_file}}","{tries}"]',
        "agent.timeout_s=20",
        "fault_tolerance.enabled=true",
        'debug.save_rollout_data="dumps/{rollout_id}.jsonl"',
        timeout_s=280,
    )
    assert done.code == 0, done.err
    assert "restarting gateway" in done.out + done.err
    ledger = command.run_dir / "ledger.jsonl"
    assert check_ledger(ledger, command.folder / "dumps") == []
    outcomes = [page for _, page in sorted(read_ledger(ledger).items())]
    assert [page.get("failed/controller", frozenset()) for page in outcomes] == [{6}, frozenset(), frozenset()]
    samples = [
        json.loads(line)
        for number in range(3)
        for line in (command.folder / "dumps" / f"{number}.jsonl").read_text().splitlines()
    ]
    kept = [sample for sample in samples if sample["status"] != "failed"]
    assert len(kept) == 3 * 4 * 4 - 1, "each of the others is trained once"
    assert all(sample["reward"] == sample["sample_index"] % 2 for sample in kept)
    assert all(len(sampled_turns(sample)) == 2 for sample in kept)
    log = (command.run_dir / "agents" / "0" / "1.log").read_text()
    assert "failed (environment)" in log and "took longer than agent.timeout_s=20" in log
    assert log.count("turn 0 (sampled") == 2, "the turns of the first attempt are kept"
    assert command.left_over() == {}


HANGING = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


@pytest.mark.nightly
def test_ctrl_c_ends_agents_that_ignore_signals_with_all_their_processes(command: Command) -> None:
    (command.folder / "hanging.py").write_text(HANGING)
    hangs = command.folder / "hangs"
    process = command.start("eval.interval=null", REWARDED, f'agent.command=[python,hanging.py,"{hangs}"]')
    wait_until(lambda: hangs.exists() or process.poll() is not None, 200, "the start of an agent")
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert command.left_over() == {}


TWO_TURNS = """
import json, urllib.request


def agent(task, session):
    messages = list(task.messages)
    for turn in range(2):
        body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 4}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {session.api_key}"}
        request = urllib.request.Request(f"{session.base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as response:
            messages += [json.load(response)["choices"][0]["message"], {"role": "user", "content": "1+1="}]
    return float(len(messages[-2]["content"]) % 3)
"""


@pytest.mark.nightly
@pytest.mark.own_ray
@pytest.mark.timeout(1800)
def test_a_run_of_several_turns_repeats_to_the_bit_after_kills(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "two_turns.py").write_text(TWO_TURNS)
    keys = ("agent.function_path=two_turns:agent", "rollout.max_response_len=8", "eval.interval=null")
    report = run_crashtest(tmp_path, cache, "data.num_rollout=60", *keys, num_kills=3)
    assert report["differences"] == []
    assert report["sample_faults"] == []
