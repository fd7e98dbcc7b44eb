"""CombinedSink: passes every call to all of its sinks."""

import pytest

from rlscale.observe.metrics.combined_sink import CombinedSink
from rlscale.protocols import Metrics


class ListSink:
    """Stores all records; raises `error` on close."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self._error = error

    def log(self, metrics: Metrics, *, step: int) -> None:
        self.records.append((step, dict(metrics)))

    def rewind(self, step: int) -> None:
        self.records = [record for record in self.records if record[0] < step]

    def close(self) -> None:
        self.closed = True
        if self._error is not None:
            raise self._error


def test_every_sink_gets_every_record_and_is_closed() -> None:
    sinks = [ListSink(error=OSError("first")), ListSink(error=OSError("second")), ListSink()]
    combined = CombinedSink(sinks)
    combined.log({"a": 1.0}, step=4)
    with pytest.raises(OSError, match="first"):
        combined.close()
    assert all(sink.records == [(4, {"a": 1.0})] and sink.closed for sink in sinks)
