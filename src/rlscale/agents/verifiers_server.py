"""Server of an environment of the library `verifiers`, for `agent.url`: each request plays one episode.

    run ── POST /run {task, base_url, api_key, deadline_s} ──> server: episode ── requests ──> gateway of the run
     │ <── {"reward", "metadata"} ────────────────────────────────┘

An environment of `verifiers` lets a program talk to a model by its URL, so that it is an agent for rlscale. The library
requires older packages than rlscale; hence this module needs only it, and runs in another environment:

    python -m rlscale.agents.verifiers_server env.toml --write-prompts prompts.jsonl
    python -m rlscale.agents.verifiers_server env.toml --port 8300
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import itertools
import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

KEY_VARIABLE = "RLSCALE_AGENT_API_KEY"
"""Environment variable with the key of this server, the same as that of the run; without it the server has none."""

TASK = "verifiers_task"
"""Entry of a row's metadata with the index of its task."""

NO_LABEL = "graded by the environment"
"""Label of all rows."""

_numbers = itertools.count()


class VerifiersServer:
    """Plays episodes of an environment. Used from one event loop.

    Args:
        config: the environment, as the table `env` in a config file of verifiers.
        key: that requests need as bearer token; None: they need none.

    Example:
        server = VerifiersServer({"taskset": {"id": "gsm8k"}})
        result = await server.play({"task": {"row": 0, "metadata": {}}, "base_url": url, "api_key": key, ...})
    """

    def __init__(self, config: Mapping[str, Any], *, key: str | None = None) -> None:
        # Not installed where a run is: see the docstring of the module.
        import verifiers.v1 as vf

        self._vf, self._key = vf, key
        self._config = vf.resolve_env_config(dict(config))
        taskset = vf.load_taskset(self._config.taskset)
        self._stream, self._tasks = iter(taskset), list[Any]()

    def app(self) -> web.Application:
        """The endpoints `POST /run` and `GET /health`."""
        app = web.Application(client_max_size=64 * 2**20)
        app.add_routes([web.post("/run", self._run), web.get("/health", self._health)])
        return app

    def task(self, index: int) -> Any:
        """The task of an index. Tasks are read when they are first needed, because a taskset may be infinite.

        Raises:
            IndexError: there are not so many.
        """
        missing = index + 1 - len(self._tasks)
        self._tasks += itertools.islice(self._stream, max(0, missing))
        return self._tasks[index]

    def prompts(self, limit: int | None) -> list[dict[str, Any]]:
        """Rows for `data.prompt_data`, one for each task."""
        rows = []
        for index in itertools.count() if limit is None else range(limit):
            try:
                text = self.task(index).data.prompt_text
            except IndexError:
                break
            # The environment sends the messages; the text of the row is for filters and logs. The label is no answer:
            # without it an episode that used up its tokens could not be graded by a reward that compares texts.
            rows.append({"input": text or f"task {index}", "label": NO_LABEL, "metadata": {TASK: index}})
        return rows

    async def play(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The result of one episode.

        Raises:
            RuntimeError: it failed, so that it has no reward.
        """
        vf, given = self._vf, request["task"]
        task = self.task(int(given["metadata"].get(TASK, given["row"])))
        with _secret(request["api_key"]) as variable:
            client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
            context = vf.ModelContext(client=client, model=request["model"], sampling=vf.SamplingConfig())
            # One environment for each episode: its model server keeps a client for each key until it is closed.
            env = vf.load_environment(self._config)
            async with asyncio.timeout(request["deadline_s"]), env.serving():
                episode = await env.run_episode(task, context)
        return _result(episode, client)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"env": self._config.env_id})

    async def _run(self, request: web.Request) -> web.Response:
        # A header may have bytes that are no UTF-8.
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="surrogateescape")
        if self._key is not None and not hmac.compare_digest(given, self._key.encode()):
            return web.json_response({"error": f"the key must be that of {KEY_VARIABLE}"}, status=401)
        try:
            return web.json_response(await self.play(await request.json()))
        except Exception as error:  # an environment raises anything: the attempt has failed, and starts again
            return web.json_response({"error": f"{type(error).__name__}: {error}"[:2000]}, status=500)


@contextmanager
def _secret(value: str) -> Any:
    """A variable with a key: verifiers reads keys of models only from the environment of its process."""
    name = f"RLSCALE_SESSION_API_KEY_{next(_numbers)}"
    os.environ[name] = value
    try:
        yield name
    finally:
        del os.environ[name]


def _result(episode: Any, client: Any) -> dict[str, Any]:
    """The result of an episode as JSON values: the mean reward of the agents that are trained, and their metrics."""
    if not episode.ok:
        errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
        last = f"{errors[-1].type}: {errors[-1].message}" if errors else "an agent of it has not ended"
        raise RuntimeError(f"the episode failed: {last}")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    # Every call that the gateway answers is trained, so that an agent that must not be needs another model.
    if any(trace.agent.config.client == client for trace in episode.traces if not trace.agent.trainable):
        raise RuntimeError("agents that are not trained must have a client; set env.<agent>.client and .model")
    if not trained:
        raise RuntimeError("the episode must have an agent that is trained, got none")
    metrics = {name: value for trace in trained for name, value in trace.metrics.items() if value is not None}
    stops = sorted({str(trace.stop_condition) for trace in trained})
    return {
        "reward": sum(trace.reward for trace in trained) / len(trained),
        "metadata": {"verifiers": {"metrics": metrics, "stop": ", ".join(stops)}},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves, or writes the prompts of a taskset."""
    parser = argparse.ArgumentParser(prog="python -m rlscale.agents.verifiers_server", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", type=Path, help="TOML file of verifiers with a table [env]")
    parser.add_argument("--write-prompts", type=Path, help="write a file for data.prompt_data, and end")
    parser.add_argument("--limit", type=int, help="number of prompts; default: all tasks")
    parser.add_argument("--host", default="127.0.0.1", help="address; default: this machine alone")
    parser.add_argument("--port", type=int, default=8300)
    given = parser.parse_args(arguments)
    config = tomllib.loads(given.config.read_text())
    if not isinstance(config.get("env"), dict):
        parser.error(f'{given.config} must have a table [env]; write [env.taskset] with id = "<taskset>"')
    key = os.environ.get(KEY_VARIABLE) or None  # an empty one is no key
    if key is None and given.host not in ("127.0.0.1", "localhost", "::1"):
        parser.error(f"--host must be this machine without a key, got {given.host}; set {KEY_VARIABLE}")
    server = VerifiersServer(config["env"], key=key)
    if given.write_prompts is not None:
        rows = [json.dumps(each, ensure_ascii=False) + "\n" for each in server.prompts(given.limit)]
        given.write_prompts.write_text("".join(rows), encoding="utf-8")
        return
    host = f"[{given.host}]" if ":" in given.host else given.host
    sys.stdout.write(f"listening at http://{host}:{given.port}/run\n")
    sys.stdout.flush()
    # A run closes the connection at its end or at a deadline: the episode is cancelled then.
    web.run_app(server.app(), host=given.host, port=given.port, handler_cancellation=True, print=None)


if __name__ == "__main__":
    main()
