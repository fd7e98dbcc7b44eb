"""A stream that says it is a terminal, for tests of what is drawn on one."""

import io


class FakeTerminal(io.StringIO):
    """Keeps what is written, control sequences included."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class AsciiTerminal(FakeTerminal):
    """A terminal without Unicode."""

    encoding = "ascii"
