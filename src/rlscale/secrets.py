"""Detection and redaction of secrets in settings, command lines and URLs before they are stored."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import yaml

REDACTED = "<redacted>"

_ALWAYS_SECRET = frozenset(
    {"password", "passwd", "pgpassword", "passphrase", "secret", "credential", "credentials", "apikey", "authorization"}
)
_SECRET_KEY_PREFIXES = frozenset({"api", "access", "auth", "private", "wandb", "ssh"})
_TEXT_TOKENS = frozenset({"eos", "bos", "pad", "unk", "sep", "mask", "stop", "end", "per"})
_VALUE_NAMES = frozenset({"reward.key"})
"""Keys of the config that hold the name of a value of a reward. They are written to the files of a run as they are."""
_INNER_VALUE = re.compile(
    r"""([\w.]+)(\s*[:=]\s*)(\$\{[^}]*\}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(?:\\.|[^\s,{}\[\]\\"'])(?:\\.|[^,{}\[\]\\"'])*)"""
)
"""Name, separator and value within a mapping of Hydra's grammar; a value may be quoted, a reference, or have spaces."""
_URL_SECRET = re.compile(
    # A user with a password, up to the last @ of the host; a user alone, who may be a token of an HTTP server.
    r"(?<=://)[^/@\s]*:[^/\s]+(?=@)|(?:(?<=http://)|(?<=https://))[^/?@\s]+(?=@)"
    r"|(?<=[?&])(?P<name>[\w.-]+)=(?P<value>[^&#\s'\"\],}]+)",
    re.IGNORECASE,
)
"""The login of a URL, or a parameter of its query."""
_SIGNATURES = frozenset({"sig", "signature"})
"""Last words of the parameters with which a signed URL of Azure, Google or Amazon grants access."""
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast, where PyYAML was built with libyaml."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Returns True if a setting of this dotted name holds a secret: a key, a token or a password.

    Names of columns, of text tokens and of values (`data.input_key`, `eos_token`, `reward.key`) are no secrets.
    """
    if name.lstrip("+~") in _VALUE_NAMES:
        return False
    last_name = name.rsplit(".", 1)[-1]
    words = re.findall(r"[a-z0-9]+", _HUMP.sub("_", last_name).lower())
    if not words:
        return False
    *before, last = words
    # `api_key` is secret, `input_key` is a column; `hf_token` is secret, `eos_token` is text.
    prefix = before[-1] if before else ""
    if last == "key":
        # No column has the name of an environment variable: OPENAI_KEY is secret.
        return not before or prefix in _SECRET_KEY_PREFIXES or last_name.isupper()
    if last == "token":
        return prefix not in _TEXT_TOKENS
    if last in ("pwd", "pat"):
        # MYSQL_PWD and GITHUB_PAT; `PWD` alone is a folder.
        return bool(before) and (last == "pwd" or last_name.isupper())
    return not _ALWAYS_SECRET.isdisjoint(words)


def redact_override(text: str) -> str:
    """Redacts the secrets of one `name=value`, also within a mapping: `custom={api_key: ...}`."""
    return replace_secrets(text, lambda _: REDACTED)


def replace_secrets(text: str, replacement: Callable[[str], str]) -> str:
    """Replaces each secret in one `name=value`, also the login in a URL, by `replacement(value)`.

    Args:
        replacement: called with the value as written, quotes included.
    """
    name, equals, value = text.partition("=")
    if equals and is_secret(name):
        return f"{name}={replacement(value)}"

    def replace(match: re.Match[str]) -> str:
        inner, between, found = match.groups()
        is_hidden = is_secret(f"{name}.{inner}")
        return f"{inner}{between}{replacement(found) if is_hidden else found}"

    kept = name + equals + _INNER_VALUE.sub(replace, value)
    return _replace_in_urls(kept, replacement)


def redact_yaml(text: str) -> str:
    """Redacts the values of secrets in YAML; returns the same text if there are none."""
    config = yaml.load(text, Loader=_Loader)
    redacted = redact(config)
    return text if redacted == config else yaml.safe_dump(redacted, sort_keys=False)


def redact(value: Any, name: str = "") -> Any:
    """Redacts the values of secrets in a tree of JSON values, also within command lines (`run.overrides`).

    Args:
        name: dotted name of the tree. Empty: that of a whole config.
    """
    if value is not None and is_secret(name):
        return REDACTED
    if isinstance(value, dict):
        return {key: redact(inner, f"{name}.{key}" if name else str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        is_command = name.rpartition(".")[2] == "overrides"
        return [redact_override(inner) if is_command and isinstance(inner, str) else redact(inner) for inner in value]
    return _replace_in_urls(value, lambda _: REDACTED) if isinstance(value, str) else value


def _replace_in_urls(text: str, replacement: Callable[[str], str]) -> str:
    def replace(match: re.Match[str]) -> str:
        name, found = match["name"], match["value"]
        if name is None:
            return replacement(match.group())
        is_hidden = is_secret(name) or name.lower().rsplit("-", 1)[-1] in _SIGNATURES
        return f"{name}={replacement(found)}" if is_hidden else match.group()

    return _URL_SECRET.sub(replace, text)
