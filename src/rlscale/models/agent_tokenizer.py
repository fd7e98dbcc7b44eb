"""Character tokenizer with a chat template for agents: tools, tool calls and reasoning, each with one token.

    <|system|>Answer with the tool.
    add(a: integer, b: integer): The sum.
    <|user|>1+2=<|assistant|><|think|>use it<|/think|><|call|>add 1 2<|eos|><|tool|>3<|assistant|>3<|eos|>

A call is the name of a tool and its arguments: the values of the parameters in the order of the tool's schema, or one
JSON object. The short form has a tenth of the characters, which a model with a million parameters learns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlscale.models.char_tokenizer import CHARACTERS, EOS, PAD, VOCABULARY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOOL, CALL, THINK, END_THINK = "<|tool|>", "<|call|>", "<|think|>", "<|/think|>"

AGENT_VOCABULARY = (*VOCABULARY, TOOL, CALL, THINK, END_THINK)
"""The tokens of the character tokenizer, with their ids, and those of agents after them."""

IMAGE_START, IMAGE_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"

IMAGE_TOKENS = (IMAGE_START, IMAGE_END, IMAGE, VIDEO)
"""The tokens of images, by the names of Qwen's tokenizers."""

VISION_VOCABULARY = (*AGENT_VOCABULARY, *IMAGE_TOKENS)
"""The same with the tokens of images."""

UNKNOWN = "?"
"""Replaces characters that have no token, e.g. in the output of a tool: the model itself cannot write them."""

_MACROS = r"""
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is not none -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro signature(tool) -%}
{{- '\n' + tool.name + '(' -}}
{%- for name, schema in ((tool.parameters or {}).properties or {}).items() -%}
{{- ('' if loop.first else ', ') + name + ': ' + (schema.type if schema.type is string else 'any') -}}
{%- endfor -%}
{{- ')' + (': ' + tool.description if tool.description else '') -}}
{%- endmacro -%}
{%- macro call(function) -%}
{%- set found = namespace(names=none) -%}
{%- for tool in tools or [] -%}
{%- if tool.function.name == function.name -%}
{%- set found.names = ((tool.function.parameters or {}).properties or {}) | list -%}
{%- endif -%}
{%- endfor -%}
{%- set values = function.arguments -%}
{%- set short = namespace(fits=values is mapping and found.names is not none and values | list == found.names) -%}
{%- if short.fits -%}
{%- for value in values.values() -%}
{%- if value is string and (value.startswith('{') or (not loop.last and (' ' in value or not value))) -%}
{%- set short.fits = false -%}
{%- elif value is mapping or (value is not string and value is iterable) -%}
{%- set short.fits = false -%}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|call|>' + function.name -}}
{%- if short.fits -%}
{%- for value in values.values() -%}{{- ' ' + (value if value is string else value | tojson) -}}{%- endfor -%}
{%- elif values is string -%}{{- values -}}
{%- else -%}{{- values | tojson -}}
{%- endif -%}
{%- endmacro -%}
"""

AGENT_TEMPLATE = _MACROS.replace("\n", "") + (
    "{%- if tools and not (messages and messages[0].role == 'system') -%}<|system|>"
    "{%- for tool in tools -%}{{- signature(tool.function) -}}{%- endfor -%}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role not in ('system', 'user', 'assistant', 'tool') -%}"
    "{{- raise_exception('unknown role ' + message.role) -}}{%- endif -%}"
    "{{- '<|' + message.role + '|>' -}}"
    "{%- if message.role == 'assistant' and message.reasoning_content -%}"
    "{{- '<|think|>' + message.reasoning_content + '<|/think|>' -}}{%- endif -%}"
    "{{- text(message.content) -}}"
    "{%- if tools and loop.first and message.role == 'system' -%}"
    "{%- for tool in tools -%}{{- signature(tool.function) -}}{%- endfor -%}{%- endif -%}"
    "{%- if message.role == 'assistant' -%}"
    "{%- for each in message.tool_calls or [] -%}{{- call(each.function) -}}{%- endfor -%}"
    "{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""Keeps the reasoning of earlier answers, so that the ids of a longer conversation begin with those of a shorter."""


_TEXT_PART = "{%- if part.type == 'text' -%}{{- part.text -}}"
assert _TEXT_PART in AGENT_TEMPLATE, "the part of a message that images are added to"

VISION_TEMPLATE = AGENT_TEMPLATE.replace(
    _TEXT_PART, _TEXT_PART + "{%- elif part.type == 'image' -%}" + IMAGE_START + IMAGE + IMAGE_END
)
"""The same with images among the parts of a message, each as one placeholder."""


def agent_tokenizer(max_length: int, *, has_images: bool = False) -> PreTrainedTokenizerFast:
    """Builds the tokenizer. It encodes every text: a character without a token becomes `?`, a tab a space.

    Args:
        max_length: maximum sequence length of the model, in tokens.
        has_images: with the tokens of images.
    """
    # Imported here: code that only needs the vocabulary size must not wait for transformers.
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = VISION_VOCABULARY if has_images else AGENT_VOCABULARY
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}))
    # Escaped for the regular expression of all other characters.
    known = "".join("\\" + character if not character.isalnum() else character for character in CHARACTERS)
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace("\r\n", "\n"),
            normalizers.Replace("\t", " "),
            normalizers.Replace(Regex(f"[^{known}]"), UNKNOWN),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # Added tokens are found in a text before it is cut into characters.
    special = [token for token in vocabulary if token.startswith("<|")]
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[token for token in special if token not in (PAD, EOS)],
        chat_template=VISION_TEMPLATE if has_images else AGENT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
