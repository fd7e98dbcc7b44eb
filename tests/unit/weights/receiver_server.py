"""A fake engine with a real weight receiver, as a process: prints its URL, then serves until its stdin closes.

Usage: python receiver_server.py [fault]
with fault one of: stale_version, refuse_buckets, dies_on_bucket, deaf, packed
"""

import os
import sys
import time

from rlscale.engines.fake import FakeServer
from rlscale.protocols import IncomingWeights
from rlscale.types import WeightBucket
from rlscale.weights.receiver import EngineReceiver


class DyingReceiver(EngineReceiver):
    """Ends its process when the first bucket comes."""

    def open_bucket(self, bucket: WeightBucket, group_name: str) -> IncomingWeights:
        os._exit(9)

    def open_tensors(self, payload: str, load_format: str) -> IncomingWeights:
        super().open_tensors(payload, load_format)
        os._exit(9)


class DeafReceiver(EngineReceiver):
    """Never joins the broadcast, and never says so."""

    def open_bucket(self, bucket: WeightBucket, group_name: str) -> IncomingWeights:
        time.sleep(3600)
        raise AssertionError("unreachable")


class PackedReceiver(EngineReceiver):
    """Reads SGLang's form alone."""

    @property
    def formats(self) -> list[str]:
        return []


def main() -> None:
    fault = sys.argv[1] if len(sys.argv) > 1 else ""
    kinds = {"dies_on_bucket": DyingReceiver, "deaf": DeafReceiver, "packed": PackedReceiver}
    with FakeServer(receiver=kinds.get(fault, EngineReceiver)()) as fake:
        fake.faults.stale_version = fault == "stale_version"
        fake.faults.refuse_buckets = fault == "refuse_buckets"
        sys.stdout.write(fake.url + "\n")
        sys.stdout.flush()
        sys.stdin.read()
        os._exit(0)  # a deaf receiver's thread would keep the process


if __name__ == "__main__":
    main()
