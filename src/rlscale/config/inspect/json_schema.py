"""JSON schemas of the YAML files in `conf/`: editors use them to complete keys and options and to mark errors.

The files contain differences only, so no key is required; any value may be an interpolation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from rlscale.config.hydra.config_folders import ConfigFolders
from rlscale.config.hydra.yaml_files import GLOBAL_GROUPS
from rlscale.config.inspect.help import group_summary
from rlscale.config.keys import Key, keys, nodes
from rlscale.config.passthrough import megatron_args, sglang_args
from rlscale.config.passthrough.check import LIBRARIES
from rlscale.config.passthrough.field_types import alternatives
from rlscale.config.passthrough.recorded import read_recorded

Schema = dict[str, Any]
Types = Mapping[str, Mapping[str, str]]
"""Types of the keys that a group passes to a library, as text, by group and name."""

WHOLE = "experiment"
"""The schema of files that set keys of every group: experiments, overlays, and a `config.yaml`."""

_DRAFT = "http://json-schema.org/draft-07/schema#"  # the draft that editors support best
_DEFINITIONS: Schema = {"interpolation": {"type": "string", "pattern": r"\$\{"}}
_TYPES: Mapping[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
}
_RECORDED = {"sglang": sglang_args.RECORDED, "megatron": megatron_args.RECORDED}
_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}


def recorded_types() -> dict[str, dict[str, str]]:
    """The keys that groups pass to a library, with their types in the tested version of the library."""
    return {
        group: {name: text for name, text in read_recorded(file).types.items() if name not in LIBRARIES[group].reserved}
        for group, file in _RECORDED.items()
    }


def make_schemas(folders: ConfigFolders, types: Types) -> dict[str, Schema]:
    """A schema by file name: `<group>.json` for each group that has options, and one for files that set every group."""
    groups = folders.groups()
    made = {f"{WHOLE}.json": whole_schema(folders, types)}
    for group in groups:
        if group in nodes():
            made[f"{group}.json"] = group_schema(group, folders, types)
    return made


def group_schema(group: str, folders: ConfigFolders, types: Types) -> Schema:
    """The schema of the files `conf/<group>/*.yaml`."""
    node = _node(group, types)
    node["properties"]["defaults"] = _defaults(folders.groups().get(group, []), {})
    return {"$schema": _DRAFT, "title": f"conf/{group}/*.yaml", "definitions": _DEFINITIONS, **node}


def whole_schema(folders: ConfigFolders, types: Types) -> Schema:
    """The schema of files that set keys of every group."""
    groups = dict.fromkeys(key.group for key in keys().values() if key.group)
    properties = {group: _node(group, types) for group in groups}
    properties |= {key.path: _key_schema(key) for key in keys().values() if not key.group}
    options = folders.groups()
    both = [name for group in GLOBAL_GROUPS for name in options.get(group, [])]
    properties["defaults"] = _defaults(both, options)
    properties["hydra"] = {"type": "object", "description": "Settings of Hydra."}
    return {
        "$schema": _DRAFT,
        "title": "conf/experiment/*.yaml and conf/on/*.yaml",
        "definitions": _DEFINITIONS,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def editor_settings(folders: ConfigFolders, schemas: str, conf: str) -> str:
    """The text of `.vscode/settings.json`, which assigns the schemas to files.

    Args:
        schemas, conf: the folders of the schemas and of the YAML files, relative to that of the workspace.
    """
    files: dict[str, str | Sequence[str]] = {
        f"{schemas}/{group}.json": f"{conf}/{group}/*.yaml" for group in folders.groups() if group in nodes()
    }
    files[f"{schemas}/{WHOLE}.json"] = [*(f"{conf}/{group}/*.yaml" for group in GLOBAL_GROUPS), f"{conf}/config.yaml"]
    return json.dumps({"yaml.schemas": files}, indent=2) + "\n"


def _node(path: str, types: Types) -> Schema:
    """The keys of a group, or of a nested group, as an object."""
    properties: Schema = {}
    for key in keys().values():
        if not key.path.startswith(f"{path}."):
            continue
        # `suffix` is set for a key of a nested group, which becomes a nested object.
        name, _, suffix = key.path.removeprefix(f"{path}.").partition(".")
        if name not in properties:
            properties[name] = _node(f"{path}.{name}", types) if suffix else _key_schema(key)
    for name, text in types.get(path, {}).items():
        properties.setdefault(name, _or_interpolation(_type_text_schema(text)))
    description = group_summary(path)
    return {"type": "object", "description": description, "properties": properties, "additionalProperties": False}


def _key_schema(key: Key) -> Schema:
    kind = _type_schema(key)
    parts = [kind, {"type": "null"}] if key.optional else [kind]
    schema: Schema = {**_or_interpolation(*parts), "description": key.description}
    if not key.required:
        schema["default"] = json.loads(json.dumps(key.default, default=str))  # converts choices to strings
    return schema


def _type_schema(key: Key) -> Schema:
    if key.choices:
        return {"enum": list(key.choices)}
    origin, inner = get_origin(key.type), get_args(key.type)
    kind: Schema
    if origin is list:
        kind = {"type": "array", "items": dict(_TYPES[inner[0]])}
    elif origin is dict:
        kind = {"type": "object"}
        if inner[1] in _TYPES:
            kind["additionalProperties"] = dict(_TYPES[inner[1]])
    else:
        kind = dict(_TYPES[key.type])
    # The constraints are objects of annotated-types with one attribute each.
    for bound in key.constraints:
        kind |= {word: getattr(bound, name) for name, word in _BOUNDS.items() if hasattr(bound, name)}
        if getattr(bound, "min_length", None) is not None:
            kind["minItems" if origin is list else "minLength"] = bound.min_length
    return kind


def _type_text_schema(text: str) -> Schema:
    kinds = [_alternative_schema(kind) for kind in alternatives(text)]
    # An empty schema accepts anything, so the alternatives do not matter.
    if {} in kinds:
        return {}
    if all(kind.keys() == {"enum"} for kind in kinds):
        return {"enum": [kind["enum"][0] for kind in kinds]}
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _alternative_schema(kind: str) -> Schema:
    if kind.startswith("list["):
        return {"type": "array", "items": _type_text_schema(kind[5:-1])}
    names = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "dict": "object", "null": "null"}
    if kind in names:
        return {"type": names[kind]}
    return {} if kind == "any" else {"enum": [json.loads(kind)]}


def _or_interpolation(*kinds: Schema) -> Schema:
    return {"anyOf": [*kinds, {"$ref": "#/definitions/interpolation"}]} if {} not in kinds else {}


def _defaults(own: Sequence[str], groups: Mapping[str, Sequence[str]]) -> Schema:
    """A defaults list: files of the same group that this one includes, and options of `groups`."""
    options = {
        group: {"anyOf": [{"enum": [*names, None]}, {"type": "array", "items": {"enum": list(names)}}]}
        for group, names in groups.items()
    }
    entry: Schema = {
        "type": "object",
        "properties": {f"override /{group}": value for group, value in options.items()},
        "patternProperties": {f"^/?{group}$": value for group, value in options.items()}
        | {"^(override )?/?hydra/": {"type": ["string", "null"]}},
        "additionalProperties": False,
    }
    description = "Files that this one includes" + (", and options that it selects." if groups else ".")
    return {"type": "array", "description": description, "items": {"anyOf": [{"enum": [*own, "_self_"]}, entry]}}
