"""What is a secret in settings, command lines and URLs, and how it is left out of what is stored."""

import re
from collections.abc import Callable
from typing import Any

import yaml

REDACTED = "<redacted>"

_ALWAYS_SECRET = frozenset(
    {"password", "passwd", "passphrase", "secret", "credential", "credentials", "apikey", "authorization"}
)
_KEY_OWNERS = frozenset({"api", "access", "auth", "private", "wandb", "ssh"})
_TOKEN_OF_TEXT = frozenset({"eos", "bos", "pad", "unk", "sep", "mask", "stop", "end", "per"})
_INNER_VALUE = re.compile(
    r"""([\w.]+)(\s*[:=]\s*)(\$\{[^}]*\}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(?:\\.|[^\s,{}\[\]\\"'])(?:\\.|[^,{}\[\]\\"'])*)"""
)
"""Name, separator and value inside of a mapping in Hydra's grammar; a value may be quoted, refer, or hold spaces."""
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+:[^/@\s]+(?=@)")


def is_secret(name: str) -> bool:
    """True when a setting of this dotted name holds a secret: a key, a token or a password.

    Names of columns and tokens of text (`data.input_key`, `eos_token`) are none.
    """
    words = re.findall(r"[a-z0-9]+", name.rsplit(".", 1)[-1].lower())
    if not words:
        return False
    *before, last = words
    owner = before[-1] if before else ""
    if last == "key":
        return not before or owner in _KEY_OWNERS
    if last == "token":
        return owner not in _TOKEN_OF_TEXT
    return not _ALWAYS_SECRET.isdisjoint(words)


def redact_override(text: str) -> str:
    """One `name=value` with the value of a secret left out, also inside of a mapping: `custom={api_key: ...}`."""
    return replace_secrets(text, lambda _: REDACTED)


def replace_secrets(text: str, replacement: Callable[[str], str]) -> str:
    """One `name=value` with each secret in it, also the login in a URL, replaced by what `replacement` makes of it.

    Args:
        replacement: gets the value as it stands, with its quotes.
    """
    name, equals, value = text.partition("=")
    if equals and is_secret(name):
        return f"{name}={replacement(value)}"

    def replace(match: re.Match[str]) -> str:
        inner, between, found = match.groups()
        return f"{inner}{between}{replacement(found) if is_secret(inner) else found}"

    kept = name + equals + _INNER_VALUE.sub(replace, value)
    return _URL_LOGIN.sub(lambda match: replacement(match.group()), kept)


def redact_yaml(text: str) -> str:
    """The same YAML with the values of secrets left out; untouched when it holds none."""
    config = yaml.safe_load(text)
    redacted = redact(config)
    return text if redacted == config else yaml.safe_dump(redacted, sort_keys=False)


def redact(value: Any, name: str = "") -> Any:
    """A tree of JSON values with the values of secrets left out, also inside of command lines (`run.overrides`)."""
    if value is not None and is_secret(name):
        return REDACTED
    if isinstance(value, dict):
        return {key: redact(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        is_command = name == "overrides"
        return [redact_override(inner) if is_command and isinstance(inner, str) else redact(inner) for inner in value]
    return _without_login(value) if isinstance(value, str) else value


def _without_login(text: str) -> str:
    return _URL_LOGIN.sub(REDACTED, text)
