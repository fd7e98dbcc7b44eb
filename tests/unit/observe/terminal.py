"""Streams that claim to be a terminal, for tests of terminal output."""

import io


class FakeTerminal(io.StringIO):
    """Stores the output, including control sequences."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class AsciiTerminal(FakeTerminal):
    """Terminal without Unicode."""

    encoding = "ascii"
