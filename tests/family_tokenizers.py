"""Small byte tokenizers with the special tokens of model families, and short chat templates of their form.

The tokenizers of the models cannot be downloaded in a test. Their templates have no tools here.
"""

from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{% if m.role == 'tool' %}{{ '<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ (c.function.arguments if c.function.arguments is string else c.function.arguments | tojson) }}"
    "{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Of Qwen; without the system's message that Qwen2.5 adds and the reasoning that Qwen3 removes."""

FORGETFUL = CHATML.replace(
    "{% else %}{{ m.content }}",
    "{% elif m.role == 'assistant' and not loop.last %}{{ 'old' }}{% else %}{{ m.content }}",
)
"""ChatML that rewrites earlier answers, as templates do that remove reasoning."""

LOOKS_BACK = CHATML.replace(
    "{{ '<|im_end|>\n' }}", "{{ '<|im_end|>\n' }}{% if m.role == 'user' %}{{ messages[0].content }}{% endif %}"
)
"""ChatML whose new messages repeat the first one: a bridge by suffix would be wrong."""

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n'"
    " + 'Today Date: 26 Jul 2024\n\n' }}"
    "{% set rest = messages %}{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    "{% set rest = messages[1:] %}{% endif %}{{ '<|eot_id|>' }}"
    "{% for m in rest %}"
    "{{ '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

GLM4 = (
    "{{ '[gMASK]<sop>' }}{% for m in messages %}"
    "{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

GLM45 = GLM4.replace("m.content }}", "('<think></think>\n' if m.role == 'assistant' else '') + m.content }}")


def wide(text: str) -> str:
    """The text with the two characters of DeepSeek's special tokens instead of `|` and `_`."""
    return text.replace("|", "\uff5c").replace("_", "\u2581")


DEEPSEEK_V3 = wide(
    "{{ '<|begin_of_sentence|>' }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end_of_sentence|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
).replace(wide("add_generation_prompt"), "add_generation_prompt")

DEEPSEEK_R1 = DEEPSEEK_V3.replace(
    wide("{{ '<|Assistant|>' }}{% endif %}"), wide("{{ '<|Assistant|><think>\n' }}{% endif %}")
)

KIMI_K2 = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.'"
    " + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)

MOONLIGHT = KIMI_K2.replace(
    "You are Kimi, an AI assistant created by Moonshot AI.", "You are a helpful assistant"
).replace("<|im_end|>\n", "<|im_end|>")

GLM5 = (
    "{{ '[gMASK]<sop>' }}{% for m in messages %}"
    "{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>' }}"
    "{{ ('</think>' if m.role == 'assistant' else '') + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"
)

MINIMAX_M2 = (
    "{{ ']~!b[' }}{% if messages[0].role != 'system' %}"
    "{{ ']~b]system\nYou are a helpful assistant. Your name is MiniMax-M2.5 and is built by MiniMax.[e~[\n' }}"
    "{% endif %}{% for m in messages %}"
    "{{ ']~b]' + ('ai' if m.role == 'assistant' else m.role) + '\n' + m.content + '[e~[\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}"
)

_CHATML_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
)
_GLM_TOKENS = (
    "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call>"
    " </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>"
)
_DEEPSEEK_TOKENS = wide(
    "<|begin_of_sentence|> <|end_of_sentence|> <|User|> <|Assistant|> <|tool_calls_begin|> <|tool_calls_end|>"
    " <|tool_call_begin|> <|tool_call_end|> <|tool_sep|> <|tool_outputs_begin|> <|tool_outputs_end|>"
    " <|tool_output_begin|> <|tool_output_end|> <think> </think>"
)
_KIMI_TOKENS = (
    "[EOS] <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> <|tool_calls_section_begin|>"
    " <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>"
)
_MOONLIGHT_TOKENS = "[EOS] <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|>"
_MINIMAX_TOKENS = "]~!b[ ]~b] [e~[ <think> </think> <minimax:tool_call> </minimax:tool_call>"
_LLAMA_TOKENS = (
    "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|end_of_text|> <|eom_id|> <|python_tag|>"
)

TOKENIZERS: dict[str, tuple[str, str, str]] = {
    "qwen": (_CHATML_TOKENS, CHATML, "<|im_end|>"),
    "forgetful": (_CHATML_TOKENS, FORGETFUL, "<|im_end|>"),
    "looks_back": (_CHATML_TOKENS, LOOKS_BACK, "<|im_end|>"),
    "llama3": (_LLAMA_TOKENS, LLAMA3, "<|eot_id|>"),
    "glm4": (_GLM_TOKENS, GLM4, "<|endoftext|>"),
    "glm45": (_GLM_TOKENS, GLM45, "<|endoftext|>"),
    "deepseek_v3": (_DEEPSEEK_TOKENS, DEEPSEEK_V3, wide("<|end_of_sentence|>")),
    "deepseek_r1": (_DEEPSEEK_TOKENS, DEEPSEEK_R1, wide("<|end_of_sentence|>")),
    "kimi_k2": (_KIMI_TOKENS, KIMI_K2, "<|im_end|>"),
    "moonlight": (_MOONLIGHT_TOKENS, MOONLIGHT, "[EOS]"),
    "glm5": (_GLM_TOKENS + " <tool_response> </tool_response>", GLM5, "<|endoftext|>"),
    "minimax_m2": (_MINIMAX_TOKENS, MINIMAX_M2, "[e~["),
}
"""Name -> special tokens, chat template and token that ends an answer."""


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of `TOKENIZERS`, which also has tokens for `th` and `in` that its encoding prefers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special, template, end = TOKENIZERS[name]
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special.split(), *characters, "th", "in"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("i", "n")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        additional_special_tokens=special.split(),
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
