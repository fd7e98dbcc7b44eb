"""Runs the web application of a server until a signal or a failure ends it."""

import asyncio
import gc
import resource
import signal

from aiohttp import web

from rlscale.hosts import join_host_port

# A pooled connection of a client outlives any pause between two rollouts.
KEEPALIVE_S = 3600.0
SHUTDOWN_S = 2.0


def raise_file_limit() -> None:
    """Allows this process as many open connections as the system does.

    The usual limit of 1,024 is that of programs which use `select`. At the limit no one can connect any more, also if
    the clients of all these connections are slow or send nothing; such a connection costs about 6 kB.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def exclude_startup_objects() -> None:
    """Excludes all objects that exist now from garbage collection; call it when a server is ready.

    Python examines all objects once those that are new are a quarter of them. Imports leave 200,000 or more, so that a
    server would keep 50,000 others before the cycles among these are freed: it would grow for hours.
    """
    gc.collect()
    gc.freeze()
    # Python counts the quarter from what the last full collection examined, now next to nothing.
    gc.collect()


class Server:
    """One web application on one address. With `port` 0 it binds a free port; `url` contains it.

    Example:
        server = Server(make_app(service), host="127.0.0.1", port=0)
        await server.start()
        await server.run()  # until SIGTERM, SIGINT or fail()
    """

    def __init__(self, app: web.Application, *, host: str, port: int) -> None:
        self._app, self._host, self._port = app, host, port
        self._runner: web.AppRunner | None = None
        self._ended: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        assert self._runner is not None and self._runner.addresses, "the server is not started"
        return f"http://{join_host_port(self._host, self._runner.addresses[0][1])}"

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        # Handlers are cancelled when their client disconnects, so that no tokens are generated for it.
        self._runner = web.AppRunner(
            self._app,
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_S,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, backlog=1024).start()

    async def run(self) -> None:
        """Serves until a signal. Raises RuntimeError after `fail`."""
        raise_file_limit()
        assert self._ended is not None and self._loop is not None, "the server is not started"
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._end, None)
        try:
            await self._ended
        finally:
            await self.stop()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def fail(self, error: BaseException) -> None:
        """Ends `run` with an error. Safe from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        assert self._ended is not None
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(RuntimeError(f"the server failed: {type(error).__name__}: {error}"))
