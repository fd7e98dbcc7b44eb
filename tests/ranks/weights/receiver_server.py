"""A fake engine with a real weight receiver, as a process: prints its URL, then serves until its stdin closes.

Usage: python receiver_server.py [fault]
with fault one of: stale_version, refuse_buckets, dies_on_bucket, hangs_on_bucket, packed
"""

import os
import sys
import time

from rlscale.engines.fake import FakeServer
from rlscale.protocols import IncomingWeights
from rlscale.weight_types import WeightBucket
from rlscale.weights.receiver import EngineReceiver


class DyingReceiver(EngineReceiver):
    """Exits its process at the first bucket."""

    def open_bucket(self, bucket: WeightBucket, group_name: str) -> IncomingWeights:
        os._exit(9)

    def open_tensors(self, payload: str, load_format: str) -> IncomingWeights:
        super().open_tensors(payload, load_format)
        os._exit(9)


class HangingReceiver(EngineReceiver):
    """Never joins the broadcast and never answers."""

    def open_bucket(self, bucket: WeightBucket, group_name: str) -> IncomingWeights:
        time.sleep(3600)
        raise AssertionError("unreachable")


class PackedReceiver(EngineReceiver):
    """Reads SGLang's formats only."""

    @property
    def formats(self) -> list[str]:
        return []


def main() -> None:
    fault = sys.argv[1] if len(sys.argv) > 1 else ""
    receivers = {"dies_on_bucket": DyingReceiver, "hangs_on_bucket": HangingReceiver, "packed": PackedReceiver}
    with FakeServer(receiver=receivers.get(fault, EngineReceiver)()) as fake:
        fake.faults.stale_version = fault == "stale_version"
        fake.faults.refuse_buckets = fault == "refuse_buckets"
        sys.stdout.write(fake.url + "\n")
        sys.stdout.flush()
        sys.stdin.read()
        # Not sys.exit: the thread of a hanging receiver would keep the process alive.
        os._exit(0)


if __name__ == "__main__":
    main()
