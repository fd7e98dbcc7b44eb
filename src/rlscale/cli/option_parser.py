"""An argument parser whose errors are one line in the form of all other errors; argparse prints its usage first."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

WRONG_INPUT = 2
_CHOICE = re.compile(r"argument (?P<name>[^:]+): invalid choice: (?P<value>.+) \(choose from (?P<choices>.+)\)", re.S)
_VALUE = re.compile(r"argument (?P<name>[^:]+): invalid (?P<kind>\w+) value: (?P<value>.+)", re.S)
_COUNT = re.compile(r"argument (?P<name>[^:]+): expected (?P<number>.+)")
_MISSING = re.compile(r"the following arguments are required: (?P<names>.+)")
_UNKNOWN = re.compile(r"unrecognized arguments: (?P<given>.+)", re.S)
_KINDS = {"int": "an integer", "float": "a number"}


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to the help of an argument that has one; None stands for a default that the help explains."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class OptionParser(argparse.ArgumentParser):
    """The parser of a command.

    Example:
        parser = OptionParser(prog="rlscale-doctor", description="Checks a machine.")
    """

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with code 2."""
        self.exit(WRONG_INPUT, f"{self.prog}: {self._rephrase(message)}\n")

    def _rephrase(self, message: str) -> str:
        """`<argument> must <rule>, got <value>; <what to do>`. An unknown message stays as it is."""
        # Imported here: rlscale-serve starts without the config.
        from rlscale.config.problems import nearest

        see = f"{self.prog} --help lists the arguments"
        if found := _CHOICE.fullmatch(message):
            choices = found["choices"].replace("'", "").split(", ")
            value = _unquoted(found["value"])
            similar = nearest(value, choices)
            fix = f"did you mean {similar}?" if similar else see
            return f"{found['name']} must be one of {', '.join(choices)}, got {value}; {fix}"
        if found := _VALUE.fullmatch(message):
            kind = _KINDS.get(found["kind"], f"a {found['kind']}")
            return f"{found['name']} must be {kind}, got {_unquoted(found['value'])}; {see}"
        if found := _COUNT.fullmatch(message):
            if found["number"] in ("one argument", "at least one argument"):
                return f"{found['name']} must have a value, got nothing; {see}"
            return f"{found['name']} must have {found['number']}, got another number of them; {see}"
        if found := _MISSING.fullmatch(message):
            return f"{found['names']} must be given, got nothing; {see}"
        if found := _UNKNOWN.fullmatch(message):
            flag = found["given"].split()[0].partition("=")[0]
            if flag[0] != "-":
                return f"arguments must end before {flag}, got one too many; {see}"
            similar = nearest(flag, re.findall(r"--[a-z][a-z-]+", self.format_help()))
            fix = f"did you mean {similar}?" if similar and similar != flag else see
            return f"{flag} must be a known argument, got {flag}; {fix}"
        return f"{message}; {see}"


def _unquoted(value: str) -> str:
    return value[1:-1] if value[:1] == value[-1:] == "'" else value
