"""Several Ray nodes on this machine, each a raylet with GPUs that do not exist."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_ray_address_file
from ray.cluster_utils import Cluster

from rlscale.cluster.process_reaper import reaped_session
from rlscale.cluster.ray_daemons import needed_daemons
from rlscale.cluster.ray_end import end_ray
from rlscale.cluster.ray_session import PASSIVE_OMP_ENV, SIMULATED_GPUS, environment
from rlscale.control.signals import interrupt_on_ending_signals

OBJECT_STORE_BYTES = 150 * 1024 * 1024
"""Size of the object store of a node. Ray maps it, but only the part that holds objects uses memory."""

NODE_ENV: Mapping[str, str] = {
    **PASSIVE_OMP_ENV,
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # All processes share the cores of one machine, so that workers and heartbeats may be late.
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_health_check_timeout_ms": "120000",
}
"""Environment of the nodes, and through them of every actor."""


@contextmanager
def simulated_nodes(num_nodes: int, gpus_per_node: int) -> Iterator[None]:
    """Starts the nodes and connects this process to the first; ends all of their processes at the end.

    A run inside uses them as a cluster that already runs. Like a Ray that a run starts, they require a token.
    """
    assert not ray.is_initialized(), "one cluster at a time"
    if threading.current_thread() is threading.main_thread():
        interrupt_on_ending_signals()
    node: dict[str, Any] = {
        # Every actor claims one CPU and one GPU; one more CPU is for actors without a GPU.
        "num_cpus": gpus_per_node + 1,
        "num_gpus": gpus_per_node,
        "resources": {SIMULATED_GPUS: gpus_per_node},
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    # A raylet refuses to have more GPUs than CUDA_VISIBLE_DEVICES names.
    with reaped_session(), environment(NODE_ENV), _without("CUDA_VISIBLE_DEVICES"), _kept_address() as keep_address:
        _require_token()
        with needed_daemons():
            cluster: Any = Cluster(initialize_head=True, head_node_args=node, shutdown_at_exit=False)
        try:
            keep_address()
            with needed_daemons():
                for _ in range(num_nodes - 1):
                    cluster.add_node(**node)
            ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            yield
        finally:
            end_ray()
            cluster.shutdown()


def _require_token() -> None:
    """Makes Ray refuse clients without this user's token, which is created if there is none."""
    with suppress(ImportError):  # an older Ray has no tokens
        from ray._private.authentication import authentication_token_setup as tokens

        logging.getLogger("ray").setLevel(logging.ERROR)
        if tokens.enable_token_auth_by_default():
            tokens.ensure_token_if_auth_enabled(None, create_token_if_missing=True)


@contextmanager
def _without(name: str) -> Iterator[None]:
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


@contextmanager
def _kept_address() -> Iterator[Callable[[], None]]:
    """Restores the file in which Ray looks for a cluster of this machine, now and at the end.

    The nodes write it when they start, and other runs must not attach to them.
    """
    file = Path(get_ray_address_file(None))
    before = file.read_text() if file.is_file() else None

    def restore() -> None:
        if before is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(before)

    try:
        yield restore
    finally:
        restore()
