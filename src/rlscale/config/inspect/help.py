"""Documentation of groups and keys as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.keys import Key, keys
from rlscale.config.passthrough import passthrough_groups
from rlscale.config.passthrough.check import LIBRARIES
from rlscale.config.problems import nearest, show
from rlscale.errors import ConfigError, Problem

WIDTH = 100


def overview(folders: ConfigFolders) -> str:
    """All groups: their summary, number of keys, and options."""
    lines = ["Groups of keys. `rlscale-config help <group>` documents a group, `explain <key>` a key.", ""]
    for group, members in _by_group().items():
        if group:
            lines += _wrapped(f"{group} ({len(members)})", group_summary(group))
    lines += ["", "Keys outside of the groups:", ""]
    lines += [line for key in _by_group().get("", ()) for line in _wrapped(key.path, key.description)]
    lines += ["", "Options, selected by <group>=<option>:", ""]
    for group, options in folders.groups().items():
        lines += _wrapped(group, ", ".join(options))
    return "\n".join(lines) + "\n"


def group_help(name: str, folders: ConfigFolders) -> str:
    """Options and keys of a group, of a nested group (`algo.mis`), or of a group that has options only.

    Raises: ConfigError when there is no such group.
    """
    found = [key for key in keys().values() if key.path.startswith(f"{name}.") or (not key.group and key.path == name)]
    options = folders.groups().get(name, [])
    if not found and not options:
        raise ConfigError([unknown_group(name, folders)])
    is_group = "." not in name and any(key.group == name for key in found)
    lines = [f"{name}: {group_summary(name)}" if is_group else name, ""]
    if options:
        lines += ["options:", *_option_lines(name, options, folders), ""]
    lines += [line for key in found for line in key_lines(key)]
    if name in passthrough_groups():
        kind = LIBRARIES[name].kind.format(version=LIBRARIES[name].load({}).version)
        lines += [f"  {name}.<name>", *_indented(f"Any other name is {kind}, passed through unchanged."), ""]
    return "\n".join(lines).rstrip() + "\n"


def key_lines(key: Key) -> list[str]:
    """Type, default, constraint and description of one key."""
    head = f"{key.path}: {key.type_text}"
    head += f", {key.constraint_text}" if key.constraint_text else ""
    head += "; required" if key.required else f"; default {show(key.default)}"
    lines = textwrap.wrap(head, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False)
    return [*lines, *_indented(key.description), ""]


def group_summary(group: str) -> str:
    """The first line of the docstring of a group's dataclass."""
    owner = next(key.owner for key in keys().values() if key.path.rpartition(".")[0] == group)
    return (owner.__doc__ or "").strip().splitlines()[0]


def option_summary(group: str, option: str, folders: ConfigFolders) -> str:
    """The comment at the top of an option's file."""
    file = folders.find_file(f"{group}/{option}")
    assert file is not None, f"{group}={option} is listed and has no file"
    lines = file.read_text(encoding="utf-8").splitlines()
    # The package line is for Hydra, not part of the description.
    comments = [line.lstrip("# ").rstrip() for line in lines if line.startswith("#") and "@package" not in line]
    return " ".join(comments)


def _option_lines(group: str, options: Sequence[str], folders: ConfigFolders) -> Iterator[str]:
    for option in options:
        yield from _wrapped(f"{group}={option}", option_summary(group, option, folders), column=34)


def unknown_group(name: str, folders: ConfigFolders) -> Problem:
    """`name` is not a group of keys or options."""
    names = {group for group in _by_group() if group} | folders.groups().keys()
    found = nearest(name, names)
    fix = f"did you mean {found}?" if found else f"groups: {', '.join(sorted(names))}"
    return Problem(path="group", rule="be a group of keys or options", value=name, fix=fix)


def _by_group() -> Mapping[str, list[Key]]:
    found: dict[str, list[Key]] = {}
    for key in keys().values():
        found.setdefault(key.group, []).append(key)
    return found


def _wrapped(name: str, text: str, *, column: int = 22) -> list[str]:
    lines = [" " * column + line for line in textwrap.wrap(text, WIDTH - column)]
    head = f"  {name}"
    # A long name gets a line for itself.
    if len(head) >= column or not lines:
        return [head, *lines]
    return [head.ljust(column) + lines[0].lstrip(), *lines[1:]]


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ")
