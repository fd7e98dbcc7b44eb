"""Client of the reward server of `reward.url`, as `remote_rm` of slime.

    POST {"prompt": ..., "response": ..., "label": ...}   ->  a number, or numbers by name
    POST [{...}, {...}]  with reward.batch_size above 1   ->  a list of as many of them

It runs in a process of rewards, which limits time and concurrency and repeats failed calls with growing waits. Whatever
goes wrong is an error of the samples concerned. Messages have the server's host alone: paths and queries may be secret.
"""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rlscale.config import RewardConfig
from rlscale.config.addresses import proxy_for
from rlscale.hosts import describe_call_error
from rlscale.types import Sample

MAX_WAIT_S = 0.01
"""Longest wait of a sample for others of its batch."""

RESERVED_SHARE, MAX_RESERVED_S = 0.1, 1.0
"""Part of `reward.timeout_s` that a request may not use: its own error names the server, that of the pool cannot."""

MAX_REPLY_BYTES = 2**24
MAX_SHOWN = 200


class RewardServerError(Exception):
    """The reward server could not be reached, or gave no usable answer."""


class RemoteReward:
    """Sends samples to the server. Calls of one event loop share connections and batches.

    Example:
        reward = RemoteReward(RewardConfig(type=RewardType.remote_rm, url="http://10.0.0.1:8000/grade"))
        value = await reward(sample)
    """

    def __init__(self, config: RewardConfig, *, proxy: str | None = None) -> None:
        """Args:
        proxy: `network.http_proxy`; a server on this machine is asked directly.
        """
        assert config.url is not None, "a rule requires reward.url"
        self._url, self._config, self._proxy = config.url, config, proxy_for(config.url, proxy)
        parts = urlsplit(config.url)
        self._shown = f"{parts.scheme}://{parts.hostname}" + ("" if parts.port is None else f":{parts.port}")
        self._hidden = [text for text in (parts.query, parts.password, parts.path) if text and text != "/"]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: asyncio.Future[aiohttp.ClientSession] | None = None
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, sample: Sample) -> Any:
        """Returns the answer of the server for this sample.

        Raises:
            RewardServerError: it cannot be reached, answers with an error, or with something else than JSON.
        """
        self._open()
        payload = {"prompt": sample.prompt.text, "response": sample.response, "label": sample.prompt.label}
        if self._config.batch_size == 1:
            return await self._post(payload)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((payload, future))
        if len(self._waiting) >= self._config.batch_size:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MAX_WAIT_S, self._flush)
        return await future

    def _open(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._session, self._timer, self._waiting = loop, loop.create_future(), None, []
            self._start(self._hold_session(self._session))

    async def _hold_session(self, session: asyncio.Future[aiohttp.ClientSession]) -> None:
        # The end of the event loop cancels this task, which closes the connections.
        # Some proxies, tinyproxy among them, close a connection after its first answer without saying so.
        connector = aiohttp.TCPConnector(limit=self._config.max_concurrency, force_close=self._proxy is not None)
        limit_s = self._config.timeout_s
        timeout = aiohttp.ClientTimeout(total=limit_s - min(RESERVED_SHARE * limit_s, MAX_RESERVED_S))
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, proxy=self._proxy) as opened:
            session.set_result(opened)
            await asyncio.Event().wait()

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        batch, self._waiting, self._timer = self._waiting, [], None
        # A separate task: the deadline of one sample must not end the request of the others.
        self._start(self._send_batch([each for each in batch if not each[1].done()]))

    async def _send_batch(self, batch: list[tuple[dict[str, Any], asyncio.Future[Any]]]) -> None:
        if not batch:
            return
        try:
            values = await self._post([payload for payload, _ in batch])
            if not isinstance(values, list) or len(values) != len(batch):
                raise self._error(f"must answer a list of {len(batch)} values, got {json.dumps(values)}")
        except RewardServerError as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(RewardServerError(str(error)))
            return
        for (_, future), value in zip(batch, values, strict=True):
            if not future.done():
                future.set_result(value)

    async def _post(self, payload: Any) -> Any:
        assert self._session is not None, "the session is opened before the first request"
        session = await asyncio.shield(self._session)
        try:
            async with session.post(self._url, json=payload, allow_redirects=False) as reply:
                content = await reply.content.read(MAX_SHOWN) if reply.status != 200 else await _read(reply)
                status = reply.status
        except TimeoutError:
            raise self._error(f"did not answer within reward.timeout_s={self._config.timeout_s:g}") from None
        # Without the cause: its text or its traceback may have the URL.
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._error(f"cannot be used: {describe_call_error(error)}") from None
        text = content.decode(errors="replace")
        if status != 200:
            raise self._error(f"answered with status {status}: {text}")
        try:
            return json.loads(text)
        except ValueError:
            raise self._error(f"must answer with JSON, got {text!r}") from None

    def _error(self, what: str) -> RewardServerError:
        for hidden in self._hidden:
            what = what.replace(hidden, "<hidden>")
        return RewardServerError(f"the reward server {self._shown} {what[: 2 * MAX_SHOWN]}")


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    """The body of a reply.

    Raises:
        ValueError: it is too long.
    """
    content = bytearray()
    async for part in reply.content.iter_any():
        content += part
        if len(content) > MAX_REPLY_BYTES:
            raise ValueError(f"its answer has over {MAX_REPLY_BYTES} bytes")
    return bytes(content)
