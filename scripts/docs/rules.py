"""Writes the reference page of the rules between keys, from the rules themselves."""

from __future__ import annotations

import inspect

from rlscale.config.rules import MODULES, RULES, Rule

_INTRODUCTION = """# Rules between keys

What must hold between keys, beside the type and the limits of each. All are checked together, before anything starts;
each that does not hold is told with the value, where it was set, and what to write instead. A rule is not asked when a
key that it reads is wrong by itself.

The rules are small functions in `src/rlscale/config/rules/`, one a rule; a new one is one more function there.
"""


def make_rules_page() -> str:
    """The text of the page, without the line that says it is generated."""
    parts = [_INTRODUCTION]
    for module in MODULES:
        own = [rule for rule in RULES if rule.check.__module__ == module.__name__]
        title = (inspect.getdoc(module) or "").splitlines()[0].removesuffix(".")
        parts += [f"## {title}", "", "| rule | keys it reads |", "|---|---|", *map(_row, own), ""]
    return "\n".join(parts).rstrip() + "\n"


def _row(rule: Rule) -> str:
    """The name in words, what the docstring adds, and the keys."""
    words = rule.name.replace("_", " ").capitalize()
    more = " ".join((inspect.getdoc(rule.check) or "").split())
    keys = ", ".join(f"`{path}`" for path in dict.fromkeys(rule.reads))
    return f"| {words}. {more} | {keys} |".replace(".  |", ". |")
