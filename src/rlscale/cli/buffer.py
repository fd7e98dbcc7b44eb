"""The command `rlscale-buffer`: runs the rollout buffer service.

The key comes from the environment variable RLSCALE_BUFFER_API_KEY and never from the command line, which every user of
the machine can read.
"""

import argparse
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from rlscale.cli.long_paths import reports_long_paths
from rlscale.cli.option_parser import DefaultsFormatter, OptionParser
from rlscale.engines.process_lifetime import die_with_parent
from rlscale.engines.server.http_server import raise_file_limit
from rlscale.hosts import is_loopback, join_host_port
from rlscale.services.buffer_app import build_buffer_app
from rlscale.services.buffer_client import BUFFER_KEY_VARIABLE
from rlscale.services.buffer_store import BufferFileError, BufferStore

log = logging.getLogger("rlscale.buffer")

EXIT_USAGE = 2
SHUTDOWN_S = 2
KEEPALIVE_S = 75
BACKLOG = 2048


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="rlscale-buffer",
        description="Runs the rollout buffer: other processes submit trajectories, a run trains on them (buffer.url).",
        epilog=f"If {BUFFER_KEY_VARIABLE} is set, requests need it as a bearer token; required beyond loopback.",
        formatter_class=DefaultsFormatter,
    )
    add = parser.add_argument
    add("--file", type=Path, default=Path("buffer.sqlite3"), help="SQLite file of the trajectories; created if needed")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8889, help="port; 0 chooses a free one and logs it")
    add(
        "--keep-groups",
        type=int,
        default=None,
        help="delivered groups of each run whose trajectories stay in the file, for a run that resumes; default: all",
    )
    add("--parent-death", action="store_true", help="exit when the parent process dies")
    add("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"), help="level of the log on stderr")
    return parser


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service until a signal. Returns 0, or 2 when the arguments are invalid."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if args.parent_death:
        die_with_parent()
    api_key = os.environ.get(BUFFER_KEY_VARIABLE) or None
    if api_key is None and not is_loopback(args.host):
        rule = "set %s to a secret to accept other machines"
        log.error(f"--host must be a loopback address, got %s; {rule}", args.host, BUFFER_KEY_VARIABLE)
        return EXIT_USAGE
    if args.keep_groups is not None and args.keep_groups < 1:
        log.error("--keep-groups must be at least 1, got %d; remove it to keep all", args.keep_groups)
        return EXIT_USAGE
    try:
        listener = _listen(args.host, args.port)
    except (OSError, OverflowError) as error:
        log.error("--port must be a free port of --host %s, got %d; %s", args.host, args.port, error)
        return EXIT_USAGE
    try:
        store = BufferStore(args.file, keep_groups=args.keep_groups)
    except BufferFileError as error:
        log.error("--file %s", error)
        return EXIT_USAGE
    address = join_host_port(args.host, listener.getsockname()[1])
    log.info("the rollout buffer serves %s at http://%s", args.file, address)
    config = uvicorn.Config(
        build_buffer_app(store, api_key=api_key),
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEPALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    raise_file_limit()
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # uvicorn has ended all requests, and raises the signal again
    finally:
        store.close()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


if __name__ == "__main__":
    raise SystemExit(main())
