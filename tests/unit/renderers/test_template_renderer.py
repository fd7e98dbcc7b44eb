import pytest

from rlscale.errors import RenderError
from rlscale.models.agent_tokenizer import agent_tokenizer
from rlscale.models.char_tokenizer import character_tokenizer
from rlscale.renderers.answer_parser import FORMATS, HERMES
from rlscale.renderers.template_renderer import TemplateRenderer
from tests.family_tokenizers import family_tokenizer

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
USER = {"role": "user", "content": "1+2="}
TOOL = {"role": "tool", "tool_call_id": "call_0", "content": "3"}


def calls(*arguments: object) -> list[dict[str, object]]:
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": "add", "arguments": each}}
        for i, each in enumerate(arguments)
    ]


def ids_of(renderer: TemplateRenderer, text: str) -> list[int]:
    return renderer._tokenizer.encode(text, add_special_tokens=False)


def text_of(renderer: TemplateRenderer, ids: list[int] | None) -> str:
    assert ids is not None
    return renderer._tokenizer.decode(ids, skip_special_tokens=False)


def test_the_template_of_agents_has_tools_calls_and_reasoning(agent: TemplateRenderer) -> None:
    answer = {"role": "assistant", "content": "", "reasoning_content": "use it", "tool_calls": calls({"a": 1, "b": 2})}
    messages = [{"role": "system", "content": "Be short."}, USER, answer, TOOL]
    assert text_of(agent, agent.render(messages, tools=[ADD])) == (
        "<|system|>Be short.\nadd(a: integer, b: integer): The sum.<|user|>1+2=<|assistant|>"
        "<|think|>use it<|/think|><|call|>add 1 2<|eos|><|tool|>3<|assistant|>"
    )


def test_arguments_of_another_order_or_form_are_json(agent: TemplateRenderer) -> None:
    answer = {"role": "assistant", "content": "so", "tool_calls": calls('{"b": 1, "a": 2}', {"a": [1], "b": 2}, "{bad")}
    text = text_of(agent, agent.render([USER, answer], tools=[ADD], add_generation_prompt=False))
    assert text.endswith('so<|call|>add{"b": 1, "a": 2}<|call|>add{"a": [1], "b": 2}<|call|>add{bad<|eos|>')


def test_every_text_has_ids_and_no_other_vocabulary_changes() -> None:
    tokenizer, plain = agent_tokenizer(64), character_tokenizer(64)
    assert tokenizer.decode(tokenizer.encode("a\té\r\n\u2192^]\\-")) == "a ?\n?^]\\-"
    assert len(plain) == 101 and len(tokenizer) == 105
    assert {token: tokenizer.get_vocab()[token] for token in plain.get_vocab()} == plain.get_vocab()


@pytest.mark.parametrize("new", [[USER], [TOOL], [TOOL, TOOL], [TOOL, USER]])
def test_a_bridge_equals_a_rendering_of_a_stable_template(agent: TemplateRenderer, new: list[dict[str, str]]) -> None:
    assert agent.prefix_stable
    history = [USER, {"role": "assistant", "content": "", "tool_calls": calls({"a": 1, "b": 2}, {"a": 2, "b": 3})}]
    known = agent.render(history, tools=[ADD], add_generation_prompt=False)
    assert agent.bridge(known, new, tools=[ADD]) == agent.render([*history, *new], tools=[ADD])


def test_a_bridge_keeps_sampled_ids_that_no_encoding_gives(chatml: TemplateRenderer) -> None:
    prompt = chatml.render([USER])
    t, h = (chatml._tokenizer.convert_tokens_to_ids(each) for each in "th")
    sampled = [t, h, chatml.stop_ids[0]]
    assert ids_of(chatml, "th") != [t, h], "the case needs another tokenization"
    longer = chatml.bridge([*prompt, *sampled], [TOOL])
    assert longer is not None and longer[: len(prompt) + 3] == [*prompt, *sampled]
    assert text_of(chatml, longer[len(prompt) + 3 :]) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("fixture", ["agent", "chatml"])
def test_the_end_of_a_cut_answer_is_added(fixture: str, request: pytest.FixtureRequest) -> None:
    renderer: TemplateRenderer = request.getfixturevalue(fixture)
    known = [*renderer.render([USER]), *ids_of(renderer, "the sum is")]
    cut, whole = renderer.bridge(known, [USER]), renderer.bridge([*known, renderer.stop_ids[0]], [USER])
    assert cut == whole is not None and whole[len(known)] == renderer.stop_ids[0]


@pytest.mark.parametrize(
    ("name", "roles", "stable"),
    [
        ("qwen", ("user", "tool"), True),
        ("forgetful", ("user", "tool"), False),
        ("looks_back", (), True),
        ("llama3", ("user", "tool"), True),
        ("glm4", ("user", "tool"), True),
    ],
)
def test_bridges_are_proven_by_probes(name: str, roles: tuple[str, ...], stable: bool) -> None:
    renderer = TemplateRenderer(family_tokenizer(name), HERMES, name=name)
    assert (renderer.bridged_roles, renderer.prefix_stable) == (roles, stable)
    known = [*renderer.render([USER]), renderer.stop_ids[0]]
    assert (renderer.bridge(known, [USER]) is not None) == ("user" in roles)


def test_a_template_that_rewrites_answers_keeps_them_in_a_bridge() -> None:
    renderer = TemplateRenderer(family_tokenizer("forgetful"), HERMES, name="forgetful")
    history = [USER, {"role": "assistant", "content": "three"}]
    known = renderer.render(history, add_generation_prompt=False)[:-1]  # the model does not sample the line break
    longer = renderer.bridge(known, [USER])
    assert longer != renderer.render([*history, USER])
    assert "three" in text_of(renderer, longer) and "old" not in text_of(renderer, longer)


def test_the_next_role_ends_an_answer_of_glm4() -> None:
    renderer = TemplateRenderer(family_tokenizer("glm4"), FORMATS["glm4"], name="glm4", stop_ids=(4, 6))
    known = renderer.render([USER])
    user, observation = (renderer._tokenizer.convert_tokens_to_ids(f"<|{each}|>") for each in ("user", "observation"))
    assert {user, observation} == {4, 6}
    assert text_of(renderer, renderer.bridge([*known, user], [USER])).count("<|user|>") == 2
    assert text_of(renderer, renderer.bridge([*known, observation], [TOOL])).count("<|observation|>") == 1
    assert renderer.bridge([*known, user], [TOOL]) is None, "the answer asked for a user's message"


@pytest.mark.parametrize(
    "new", [[{"role": "assistant", "content": "3"}], [USER, {"role": "system", "content": "x"}], []]
)
def test_only_messages_of_users_and_tools_are_bridged(agent: TemplateRenderer, new: list[dict[str, str]]) -> None:
    assert agent.bridge([*agent.render([USER]), 1], new) is None


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages must not be empty"),
        ([USER, {"role": "robot", "content": "x"}], "message 2: role must be one of system"),
        ([USER, "x"], "message 2: role must be"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 1: content must be a text"),
        ([{"role": "assistant", "tool_calls": [{}]}], "message 1: a tool call must have function.name"),
    ],
)
def test_messages_of_another_form_are_named(agent: TemplateRenderer, messages: list[object], reason: str) -> None:
    with pytest.raises(RenderError, match=reason):
        agent.render(messages)  # type: ignore[arg-type]


def test_tools_and_calls_are_never_omitted_silently() -> None:
    renderer = TemplateRenderer(character_tokenizer(512), HERMES, name="tiny")
    assert renderer.bridged_roles == ("user", "tool")
    with pytest.raises(RenderError, match="omits tools"):
        renderer.render([USER], tools=[ADD])
    with pytest.raises(RenderError, match="omits tool calls"):
        renderer.render([USER, {"role": "assistant", "tool_calls": calls({})}])


def test_content_parts_developers_and_json_arguments_are_accepted(agent: TemplateRenderer) -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2="}]
    messages = [{"role": "developer", "content": "Be short.", "name": None}, {"role": "user", "content": parts}]
    assert agent.render(messages) == agent.render([{"role": "system", "content": "Be short."}, USER])


def test_a_tokenizer_without_template_is_refused() -> None:
    tokenizer = family_tokenizer("qwen")
    tokenizer.chat_template = None
    with pytest.raises(RenderError, match="chat template of none cannot render"):
        TemplateRenderer(tokenizer, HERMES, name="none")
