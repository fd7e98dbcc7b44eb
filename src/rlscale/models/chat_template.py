"""Chat template of a model folder, rendered without transformers, which takes half a second to import.

Only the checks before a run use it; the prompts of the run are rendered by the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"


class TemplateRefusal(Exception):
    """A template refused messages, by its own `raise_exception`."""


class TemplateUnknown(Exception):
    """A template needs something of transformers, or of an argument that is not known here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """A template and the special tokens that it may insert.

    Example:
        template = read_chat_template(Path("Qwen3-4B"))
        template.render([{"role": "user", "content": "1+1="}], generation_prompt=True)
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)  # e.g. `eos_token` and its text

    @property
    def eos_token(self) -> str:
        return self.tokens.get("eos_token", "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generation_prompt: bool,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of messages.

        Args:
            arguments: further variables of the template.

        Raises:
            TemplateRefusal: the template does not accept the messages.
            TemplateUnknown: it cannot be rendered here.
        """
        # Imported here: runs without a chat template need no jinja2.
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=datetime.now().strftime)
        variables = {**self.tokens, "add_generation_prompt": generation_prompt, **(arguments or {})}
        try:
            return environment.from_string(self.source).render(messages=list(messages), **variables)
        except TemplateRefusal:
            raise
        except Exception as error:  # a template may raise anything; the run renders every row with its tokenizer
            raise TemplateUnknown(str(error)) from error


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The default template of a tokenizer's folder; None: it has none."""
    settings = _read_settings(folder / SETTINGS_FILE)
    file, given = folder / TEMPLATE_FILE, settings.get("chat_template")
    if isinstance(given, list):  # several templates by name
        given = next((each["template"] for each in given if each.get("name") == "default"), None)
    source = file.read_text(encoding="utf-8") if file.is_file() else given
    if not isinstance(source, str):
        return None
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in settings.items()}
    tokens = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}
    return ChatTemplate(source=source, tokens=tokens)


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON without the escapes for HTML of jinja2's filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusal(message)
