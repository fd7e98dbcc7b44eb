"""The command `rlscale-config`: inspects configurations and starts nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import rlscale
from rlscale.cli.app import OK, WRONG_INPUT
from rlscale.cli.long_paths import reports_long_paths
from rlscale.cli.option_parser import OptionParser
from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.yaml_files import GLOBAL_GROUPS
from rlscale.config.inspect.diff import differences
from rlscale.config.inspect.explain import explain
from rlscale.config.inspect.help import group_help, overview, unknown_group
from rlscale.config.inspect.json_schema import (
    editor_settings,
    group_schema,
    make_schemas,
    recorded_types,
    whole_schema,
)
from rlscale.config.inspect.minimize import minimize, minimize_from
from rlscale.config.inspect.sources import read_source
from rlscale.config.keys import keys
from rlscale.config.load import load_config_with_notes
from rlscale.errors import ConfigError, Problem
from rlscale.secrets import redact

_CONFIGURATION = "a run folder, a config.yaml, an experiment, or overrides in quotes: 'experiment=quickstart algo=gspo'"


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="rlscale-config", description=__doc__.partition(": ")[2].capitalize())
    parser.add_argument("--version", action="version", version=f"rlscale {rlscale.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument(
            "--config-dir",
            type=Path,
            default=None,
            metavar="DIR",
            help="further options, like conf/",
        )
        return command

    command = add("help", "document a group, or all groups")
    command.add_argument("group", nargs="?", help="e.g. algo, or algo.mis; default: an overview of all")
    command = add("explain", "print the type and value of a key and where the value was set")
    command.add_argument("key", help="e.g. algo.eps_clip")
    command.add_argument("overrides", nargs="*", help="as for rlscale-train, e.g. experiment=quickstart algo=gspo")
    command.add_argument("--json", action="store_true", help="as JSON")
    command = add("diff", "list the differences between two configurations")
    command.add_argument("before", help=_CONFIGURATION)
    command.add_argument("after", help="the same")
    command.add_argument("--all", action="store_true", help="include names and folders of the run, which always differ")
    command.add_argument("--json", action="store_true", help="as JSON")
    command = add("minimize", "print a configuration as differences from defaults and options")
    command.add_argument("configuration", help=_CONFIGURATION)
    command.add_argument(
        "--command-line", action="store_true", help="print a command line instead of an experiment file"
    )
    command.add_argument(
        "--from", dest="experiment", metavar="EXPERIMENT", help="print a command line on this experiment"
    )
    command = add("schema", "print or write the JSON schemas of the YAML files, for editors")
    command.add_argument("group", nargs="?", help="print that of conf/<group>/*.yaml; default: of experiments")
    command.add_argument("--write", type=Path, metavar="DIR", help="write all to DIR and print the editor's settings")
    return parser


@reports_long_paths
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 2 when the input is wrong."""
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown and (arguments.command != "explain" or any(argument.startswith("-") for argument in unknown)):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if unknown:
        # argparse does not add arguments after a flag to a list that started before the flag.
        arguments.overrides += unknown
    try:
        sys.stdout.write(_COMMANDS[arguments.command](arguments))
    except ConfigError as error:
        sys.stderr.writelines(f"rlscale-config: {problem}\n" for problem in error.problems)
        return WRONG_INPUT
    return OK


def _help(arguments: argparse.Namespace) -> str:
    folders = ConfigFolders.find(arguments.config_dir)
    if arguments.group in keys() and "." in arguments.group:
        return _explain(argparse.Namespace(**vars(arguments), key=arguments.group, overrides=[], json=False))
    return overview(folders) if arguments.group is None else group_help(arguments.group, folders)


def _explain(arguments: argparse.Namespace) -> str:
    loaded = load_config_with_notes(arguments.overrides, config_dir=arguments.config_dir, to_run=False)
    found = explain(arguments.key, loaded)
    # Secrets must not appear in terminals and logs, neither as a value nor inside a mapping.
    found = replace(found, value=redact(found.value, found.key), replaced=redact(found.replaced, found.key))
    return json.dumps(asdict(found), indent=2) + "\n" if arguments.json else "\n".join(found.lines()) + "\n"


def _diff(arguments: argparse.Namespace) -> str:
    before, after = (read_source(text, config_dir=arguments.config_dir) for text in (arguments.before, arguments.after))
    found = differences(redact(before.values), redact(after.values), names=arguments.all)
    if arguments.json:
        return json.dumps([asdict(each) for each in found], indent=2) + "\n"
    heading = f"{len(found)} keys differ: {before.name} -> {after.name}\n"
    return heading + "".join(f"  {each}\n" for each in found)


def _minimize(arguments: argparse.Namespace) -> str:
    folders = ConfigFolders.find(arguments.config_dir)
    values = redact(read_source(arguments.configuration, config_dir=arguments.config_dir).values)
    if arguments.experiment is not None:
        return minimize_from(values, arguments.experiment, folders=folders).command() + "\n"
    minimal = minimize(values, folders=folders)
    return minimal.command() + "\n" if arguments.command_line else minimal.yaml()


def _schema(arguments: argparse.Namespace) -> str:
    folders, types = ConfigFolders.find(arguments.config_dir), recorded_types()
    if arguments.write is not None:
        try:
            arguments.write.mkdir(parents=True, exist_ok=True)
            for name, schema in make_schemas(folders, types).items():
                (arguments.write / name).write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            problem = Problem(
                path="--write",
                rule="name a folder that can be written",
                value=str(arguments.write),
                fix=error.strerror or str(error),
            )
            raise ConfigError([problem]) from error
        return editor_settings(folders, str(arguments.write), str(arguments.config_dir or "conf"))
    # Experiments and overlays set keys of every group and share one schema.
    whole = arguments.group in (None, *GLOBAL_GROUPS)
    if not whole and arguments.group not in folders.groups():
        raise ConfigError([unknown_group(arguments.group, folders)])
    made = whole_schema(folders, types) if whole else group_schema(arguments.group, folders, types)
    return json.dumps(made, indent=1) + "\n"


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], str]] = {
    "help": _help,
    "explain": _explain,
    "diff": _diff,
    "minimize": _minimize,
    "schema": _schema,
}


if __name__ == "__main__":
    sys.exit(main())
