"""Several metric sinks behind the interface of one."""

from collections.abc import Sequence

from rlscale.protocols import Metrics, MetricSink


class CombinedSink:
    """Passes every call to several sinks. `close` closes all sinks, then raises the first error."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, metrics: Metrics, *, step: int) -> None:
        for sink in self._sinks:
            sink.log(metrics, step=step)

    def rewind(self, step: int) -> None:
        for sink in self._sinks:
            sink.rewind(step)

    def close(self) -> None:
        errors: list[Exception] = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
