"""Supervised training on whole conversations: tokens in and out of the loss."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlscale.checkpoint.pending_groups import load_groups, save_groups
from rlscale.config import LossMaskType, load_config
from rlscale.data.source import build_prompt_source
from rlscale.errors import DataError
from rlscale.models.char_tokenizer import character_tokenizer
from rlscale.rollout.sft import SftSource, labelled_group
from rlscale.types import ConversationPart, Group

Write = Callable[..., str]

# Drops the thinking of answers before the last question; its generation prompt opens the thinking.
THINKS = (
    "{% set last = namespace(place=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.place = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}({{ m.role }})"
    "{% if m.role == 'assistant' and loop.index0 < last.place %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant){{ opening }}{% endif %}"
)


def talk(*turns: str) -> list[dict[str, str]]:
    """Messages from `role: text`."""
    return [dict(zip(("role", "content"), turn.split(": "), strict=True)) for turn in turns]


TALK = talk("system: S", "user: a", "assistant: b", "tool: t", "user: c", "assistant: d e", "user: f")
THOUGHT = talk("user: a", "assistant: <think>\nx</think>b", "user: c", "assistant: <think>\ny</think>d", "user: e")


def group(messages: Any, path: str, tokenizer: PreTrainedTokenizerBase, *words: str) -> Group:
    """The group of the first row of a file."""
    words = ("algo=sft", "data.label_key=null", "data.apply_chat_template=true", "data.input_key=messages", *words)
    config = load_config(["experiment=quickstart_warmup", *words, f'data.prompt_data="{path}"'])
    sft = SftSource(build_prompt_source(config, tokenizer), tokenizer, rollout_batch_size=1)
    ((index, prompt),) = sft.next_prompts(0)
    return asyncio.run(sft.group(index, prompt, oldest=3, newest=3))


def learned(found: Group, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Runs of the response's tokens with the same loss mask, as text."""
    (sample,) = found.samples
    runs: list[tuple[list[int], bool]] = []
    for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True):
        if not runs or runs[-1][1] != bool(mask):
            runs.append(([], bool(mask)))
        runs[-1][0].append(token)
    return [(tokenizer.decode(ids), is_learned) for ids, is_learned in runs]


def test_only_answers_are_in_the_loss(write_jsonl: Write, tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [message for message in TALK if message["role"] != "tool"]
    found = group(messages, write_jsonl({"messages": messages}), tokenizer)
    assert found.prompt.text == "<|system|>S<|user|>a<|assistant|>"
    assert learned(found, tokenizer) == [("b<|eos|>", True), ("<|user|>c<|assistant|>", False), ("d e<|eos|>", True)]
    (sample,) = found.samples
    whole = tokenizer.apply_chat_template(messages[:-1], tokenize=False)
    assert sample.tokens.tolist() == tokenizer.encode(whole, add_special_tokens=False)
    assert sample.weight_versions.tolist() == [3] * sample.response_len


def test_thinking_stays_where_answers_are_rendered_one_by_one(write_jsonl: Write) -> None:
    tokenizer = character_tokenizer(512)
    tokenizer.chat_template = THINKS
    path = write_jsonl({"messages": THOUGHT})
    found = group(THOUGHT, path, tokenizer, "data.loss_mask_type=qwen3")
    assert found.prompt.text == "(user)a<|eos|>\n(assistant)"
    assert learned(found, tokenizer) == [
        ("<think>\nx</think>b<|eos|>", True),
        ("\n(user)c<|eos|>\n(assistant)", False),
        ("<think>\ny</think>d<|eos|>", True),
    ]
    with pytest.raises(DataError, match=r"row 1 .*independently of later messages.*set data\.loss_mask_type=qwen3"):
        group(THOUGHT, path, tokenizer)


def test_messages_between_answers_are_rendered_together(write_jsonl: Write) -> None:
    tokenizer = character_tokenizer(512)
    tokenizer.chat_template = THINKS
    found = group(TALK, write_jsonl({"messages": TALK}), tokenizer, "data.loss_mask_type=qwen3")
    assert learned(found, tokenizer)[1] == ("\n(tool)t<|eos|>\n(user)c<|eos|>\n(assistant)", False)
    twice = talk("user: a", "assistant: b", "assistant: c")
    found = group(twice, write_jsonl({"messages": twice}), tokenizer, "data.loss_mask_type=qwen3")
    assert learned(found, tokenizer) == [("b<|eos|>", True), ("\n(assistant)", False), ("c<|eos|>", True)]


def test_answers_are_found_in_the_whole_text(write_jsonl: Write) -> None:
    # As of Qwen3.5: the thinking of the last answer stays, and the generation prompt opens it.
    tokenizer = character_tokenizer(512)
    tokenizer.chat_template = THINKS
    words = ("data.loss_mask_type=qwen3_5", 'data.apply_chat_template_kwargs.opening="<think>\n"')
    found = group(THOUGHT, write_jsonl({"messages": THOUGHT[:-1]}), tokenizer, *words)
    assert found.prompt.text == "(user)a<|eos|>\n(assistant)"
    assert learned(found, tokenizer) == [
        ("b<|eos|>", True),
        ("\n(user)c<|eos|>\n(assistant)<think>\n", False),
        ("y</think>d<|eos|>", True),
    ]
    spoofed = talk("user: (assistant)a", "assistant: b")
    with pytest.raises(DataError, match=r"start each of the 1 answers, and nothing else.*got 2 of it"):
        group(spoofed, write_jsonl({"messages": spoofed}), tokenizer, *words)


@pytest.mark.parametrize("kind", LossMaskType)
def test_an_answer_may_stay_out_of_the_loss(kind: LossMaskType, write_jsonl: Write) -> None:
    tokenizer = character_tokenizer(512)
    tokenizer.chat_template = THINKS
    first, second = talk("user: a", "assistant: b"), talk("user: c", "assistant: d")
    masked = {"step_loss_mask": 0}
    words = f"data.loss_mask_type={kind}"
    messages = [*first[:1], first[1] | masked, *second]
    found = group(messages, write_jsonl({"messages": messages}), tokenizer, words)
    assert [text for text, is_learned in learned(found, tokenizer) if is_learned] == ["d<|eos|>"]
    none = [*first[:1], first[1] | masked]
    with pytest.raises(DataError, match="row 1 must have an answer in the loss, got step_loss_mask=0 for every answer"):
        group(none, write_jsonl({"messages": none}), tokenizer, words)


def test_tools_and_calls_are_rendered(write_jsonl: Write) -> None:
    tokenizer = character_tokenizer(512)
    tokenizer.chat_template = (
        "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}({{ m.role }}){{ m.content }}"
        "{% for c in m.tool_calls or [] %}!{{ c.name }}{% endfor %}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}(assistant){% endif %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    messages = [*talk("user: a"), call, *talk("tool: 1", "assistant: b")]
    path = write_jsonl({"messages": messages, "tools": [{"name": "f"}]})
    for kind in ("qwen", "qwen3", "qwen3_5"):
        found = group(messages, path, tokenizer, "data.tool_key=tools", f"data.loss_mask_type={kind}")
        assert found.prompt.text == "[f](user)a<|eos|>(assistant)"
        assert [text for text, is_learned in learned(found, tokenizer) if is_learned] == ["!f<|eos|>", "b<|eos|>"]


def test_the_last_answer_alone(write_jsonl: Write) -> None:
    tokenizer = character_tokenizer(512)
    tokenizer.chat_template = THINKS
    words = ("data.loss_mask_type=distill_qwen", 'data.apply_chat_template_kwargs.opening="<think>\n"')
    found = group(THOUGHT, write_jsonl({"messages": THOUGHT}), tokenizer, *words)
    assert found.prompt.text == "(user)a<|eos|>\n(assistant)b<|eos|>\n(user)c<|eos|>\n(assistant)<think>\n"
    assert learned(found, tokenizer) == [("y</think>d<|eos|>", True)]
    masked = [*THOUGHT[:3], THOUGHT[3] | {"step_loss_mask": 0}]
    with pytest.raises(DataError, match="the last answer of a conversation must be in the loss, got"):
        group(masked, write_jsonl({"messages": masked}), tokenizer, *words)


@pytest.mark.parametrize("kind", LossMaskType)
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (talk("user: a"), "must have an answer"),
        (talk("assistant: a", "user: b"), "and a message before it"),
        ("text", "must have a list of messages .* or set data.label_key to the field of the answer"),
    ],
)
def test_rows_without_a_conversation_are_errors(
    messages: Any, expected: str, kind: LossMaskType, write_jsonl: Write, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match=f"row 1 .*{expected}"):
        group(messages, write_jsonl({"messages": messages}), tokenizer, f"data.loss_mask_type={kind}")


def test_conversations_that_are_too_long_are_dropped_with_a_warning(
    write_jsonl: Write, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    # <|user|>a<|assistant|> is 3 tokens, an answer its letters and an end.
    rows = [{"messages": talk("user: a", f"assistant: {'b' * length}")} for length in (6, 7, 6, 20)]
    words = ("algo=sft", "data.label_key=null", "data.apply_chat_template=true", "data.input_key=messages")
    path = write_jsonl(*rows)
    config = load_config(["experiment=quickstart_warmup", *words, f'data.prompt_data="{path}"'])
    with caplog.at_level("WARNING"):
        source = build_prompt_source(config, tokenizer, positions=10)
    assert [prompt.index for prompt in source.take(2)] == [0, 2] and len(source) == 2
    assert f"2 of 4 conversations of {path} are longer than the model's positions (10 tokens)" in caplog.text
    assert "were dropped: rows 2, 4" in caplog.text
    with pytest.raises(DataError, match=r"all 4 rows are longer than the model's positions \(5 tokens\)"):
        build_prompt_source(config, tokenizer, positions=5)


def test_a_conversation_survives_a_checkpoint(
    write_jsonl: Write, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    messages = talk("user: a", "assistant: b")
    found = group(messages, write_jsonl({"messages": messages}), tokenizer)
    save_groups(tmp_path, [found])
    assert load_groups(tmp_path) == [found]
    assert found.prompt.turns == (ConversationPart("b<|eos|>", True),)
    again = labelled_group(found.index, found.prompt, tokenizer, version=3)
    assert again == found
