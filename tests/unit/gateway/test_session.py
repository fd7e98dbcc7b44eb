"""A session without processes: budgets, records on disk, and repeated requests."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlscale.errors import EngineError, RenderError
from rlscale.gateway.apis.chat_completions import parse_chat
from rlscale.gateway.apis.chat_request import InvalidRequest
from rlscale.gateway.codec import Codec
from rlscale.gateway.session import BUDGET, CONTEXT, PreparedCall, Session
from rlscale.gateway.session_keys import SessionKeys, new_session_id
from rlscale.gateway.session_log import SessionLog
from rlscale.gateway.session_spec import SessionSpec
from rlscale.images import to_data_url
from rlscale.protocols import SAMPLED_PLACEHOLDERS
from rlscale.rollout.record_json import trajectory_from_json
from rlscale.types import Generation, Prompt, SampleStatus, SamplingParams
from tests.gateway_codec import END, build_codec, encode
from tests.scripted_vision import open_vision_model
from tests.tiny_vision import draw

PROMPT = Prompt(index=3, text="p", token_ids=(5, 6), label={"a": 1}, metadata={"source": "x"})


def make_spec(**values: Any) -> SessionSpec:
    params = SamplingParams(**{"max_new_tokens": 100, "sampling_seed": 1, **values.pop("params", {})})
    given = {
        "trajectory_id": 9,
        "group_index": 2,
        "prompt": PROMPT,
        "seed": 11,
        "expires_s": time.time() + 60,
        **values,
    }
    return SessionSpec(id=new_session_id(), params=params, **given)


def make_session(folder: Path, spec: SessionSpec | None = None) -> Session:
    spec = spec or make_spec()
    session = Session(spec, build_codec(), SessionLog(folder, spec.id))
    session.begin()
    return session


def prepare(session: Session, text: str, *, history: list[dict[str, Any]] | None = None, **more: Any) -> PreparedCall:
    messages = [*(history or []), {"role": "user", "content": text}]
    return session.prepare(parse_chat({"messages": messages, **more}), fingerprint=text, time_s=1)


def generation(text: str, *, version: int = 3, finish: str = "stop") -> Generation:
    ids = [*encode(text), END]
    return Generation(
        output_ids=ids,
        logprobs=[-0.1 / (each + 1) for each in range(len(ids))],
        weight_versions=[version] * len(ids),
        finish_reason=finish,
        text=text,
        engine="engine 0",
    )


def reopen(folder: Path, session: Session) -> Session:
    file = SessionLog(folder, session.spec.id)
    first, *others = file.read()
    again = Session(SessionSpec.from_json(first["session"]), build_codec(), file)
    again.replay(others)
    return again


class _NoRenderer:
    def render(self, *_: Any, **__: Any) -> list[int]:
        raise AssertionError("texts that no context can hold must not be encoded")


@pytest.mark.parametrize("longest", [1, 3])
def test_texts_that_no_context_can_hold_are_refused_before_they_are_encoded(tmp_path: Path, longest: int) -> None:
    spec, most = make_spec(params={"max_context_len": 10}), 10 * longest
    session = Session(spec, replace(build_codec(), max_chars_per_token=longest), SessionLog(tmp_path, spec.id))
    session.begin()
    used = len("user")
    assert prepare(session, "a" * (most - used)).token_ids, "it may fit"
    assert BUDGET not in session.trajectory.metadata
    encoding = Session(spec, Codec(renderer=_NoRenderer(), max_chars_per_token=longest), SessionLog(tmp_path, spec.id))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=f"at most {most} characters .* 10 tokens .* got {most + 1}") as refused:
        prepare(encoding, "a" * (most - used + 1))
    assert refused.value.code == "context_length_exceeded"
    assert encoding.trajectory.metadata[BUDGET] == CONTEXT, "as a refusal by tokens"
    tool = {"type": "function", "function": {"name": "f", "description": "d" * most}}
    with pytest.raises(InvalidRequest, match=f"at most {most} characters"):
        prepare(encoding, "a", tools=[tool])


def test_a_session_read_from_its_file_is_the_same(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    answer = session.commit(prepare(session, "one"), [generation("A"), generation("B", version=4)])
    message = {"role": "assistant", "content": answer.choices[1].answer.content}
    follow = [{"role": "user", "content": "one"}, message]
    session.commit(prepare(session, "two", history=follow), [generation("C")])
    session.commit(prepare(session, "other"), [generation("D", finish="length")])
    again = reopen(tmp_path, session)
    assert again.result() == session.result()
    trajectory = trajectory_from_json(json.loads(json.dumps(again.finish())))
    assert trajectory.prompt == PROMPT and trajectory.versions == {3, 4}
    assert [len(each.response_ids) for each in trajectory.samples()] == [2, 12, 2]
    # Both continue alike: the same ids for the next request, and the same seeds.
    again.is_finished = False
    for each in (session, again):
        assert prepare(each, "two", history=follow).prepared.num_known == 10


def test_a_trajectory_has_the_messages_and_times_of_its_calls(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    answer = session.commit(prepare(session, "one"), [replace(generation("A"), interval_s=(5.0, 6.5))])
    message = {"role": "assistant", "content": answer.choices[0].answer.content}
    session.commit(prepare(session, "two", history=[{"role": "user", "content": "one"}, message]), [generation("B")])
    for each in (session, reopen(tmp_path, session)):
        turns = trajectory_from_json(json.loads(json.dumps(each.result()))).turns
        assert [turn.interval_s for turn in turns if turn.sampled] == [(5.0, 6.5), None]
        found = [(known["role"], known["content"]) for turn in turns for known in turn.messages]
        assert found == [("user", "one"), ("assistant", "A"), ("user", "two"), ("assistant", "B")]


def test_a_line_that_was_cut_is_removed(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    session.commit(prepare(session, "one"), [generation("A")])
    path = SessionLog(tmp_path, session.spec.id).path
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("ab") as file:
        file.write(b'{"event":"call","finger')
    again = reopen(tmp_path, session)
    again.commit(prepare(again, "two"), [generation("B")])
    assert reopen(tmp_path, again).result()["metadata"]["num_calls"] == 2


def test_a_repeated_request_gets_its_recorded_answer(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    assert session.find_answer("one") is None
    answer = session.commit(prepare(session, "one", stop="y"), [generation("xyz")])
    assert answer.choices[0].answer.content == "x" and answer.choices[0].stop == "y"
    assert session.find_answer("one") == reopen(tmp_path, session).find_answer("one") == answer
    session.mark_delivered("one")
    assert session.find_answer("one") is None


async def test_equal_requests_have_their_own_seeds(tmp_path: Path) -> None:
    session, other = make_session(tmp_path), make_session(tmp_path)
    seeds = []
    for each in (session, session, other):
        call = prepare(each, "one")
        async with each.admit(call) as params:
            seeds.append(params.sampling_seed)
            each.commit(call, [generation("A")])
    assert seeds[0] == seeds[2] != seeds[1]


async def test_concurrent_calls_do_not_wait_and_stay_within_the_budget(tmp_path: Path) -> None:
    session = make_session(tmp_path, make_spec(params={"max_new_tokens": 8}))
    calls = [prepare(session, text) for text in ("one", "two", "three")]
    async with session.admit(calls[0]) as one, session.admit(calls[1]) as two, session.admit(calls[2]):
        assert one.max_new_tokens == two.max_new_tokens == 8
        session.commit(calls[1], [generation("ABCD")])
        answer = session.commit(calls[0], [generation("EFGH")])
        # Its answer comes when nothing is left: it is refused, as a call after the others would be.
        with pytest.raises(InvalidRequest, match="8 sampled tokens"):
            session.commit(calls[2], [generation("I")])
    (choice,) = answer.choices
    assert choice.is_cut and choice.answer.content == choice.generation.text == "EFG"
    with pytest.raises(InvalidRequest, match="8 sampled tokens") as raised:
        async with session.admit(prepare(session, "four")):
            raise AssertionError("admitted")
    assert raised.value.code == "budget_exhausted"
    for each in (session, reopen(tmp_path, session)):
        trajectory = trajectory_from_json(json.loads(json.dumps(each.result())))
        assert (trajectory.num_sampled, trajectory.status) == (8, SampleStatus.truncated)
        assert [turn.token_ids.tolist() for turn in trajectory.turns if turn.sampled] == [
            [*encode("ABCD"), END],
            encode("EFG"),
        ]


async def test_a_call_alone_may_use_all_that_is_left(tmp_path: Path) -> None:
    session = make_session(tmp_path, make_spec(params={"max_new_tokens": 9}))
    call = prepare(session, "one", n=2)
    async with session.admit(call) as params:
        assert params.max_new_tokens == 4
        answer = session.commit(call, [generation("ABCDE"), generation("F")])
    assert not any(choice.is_cut for choice in answer.choices), "together they fit"
    call = prepare(session, "two")
    async with session.admit(call) as params:
        assert params.max_new_tokens == 1


async def test_equal_concurrent_calls_have_their_own_seeds_and_a_repeated_one_keeps_its_own(tmp_path: Path) -> None:
    session, seeds = make_session(tmp_path), list[int | None]()
    first, second = prepare(session, "one"), prepare(session, "one")
    with pytest.raises(EngineError):
        async with session.admit(first) as one, session.admit(second) as two:
            seeds += [one.sampling_seed, two.sampling_seed]
            session.commit(second, [generation("A")])
            raise EngineError("the engine of the first call died")
    for each in (session, reopen(tmp_path, session)):
        async with each.admit(prepare(each, "one")) as again:
            seeds.append(again.sampling_seed)
    assert seeds[0] == seeds[2] == seeds[3] != seeds[1]


async def test_calls_wait_for_the_last_turn(tmp_path: Path) -> None:
    session, order = make_session(tmp_path, make_spec(max_turns=1)), list[str]()
    first, second = prepare(session, "one"), prepare(session, "two")

    async def run_second() -> None:
        async with session.admit(second):
            order.append("second")
            session.commit(second, [generation("A")])

    with pytest.raises(EngineError):
        async with session.admit(first):
            waiting = asyncio.create_task(run_second())
            await asyncio.sleep(0)
            order.append("first")
            raise EngineError("the engine died, so that the turn is free again")
    await waiting
    assert order == ["first", "second"]
    with pytest.raises(InvalidRequest, match="1 turns"):
        async with session.admit(prepare(session, "three")):
            raise AssertionError("admitted")


async def test_a_full_context_is_refused(tmp_path: Path) -> None:
    session = make_session(tmp_path, make_spec(params={"max_context_len": 12}))
    async with session.admit(prepare(session, "one")) as params:
        assert params.max_new_tokens == 4
    with pytest.raises(InvalidRequest, match="fewer than 12 tokens") as raised:
        async with session.admit(prepare(session, "one that is longer")):
            raise AssertionError("admitted")
    assert raised.value.code == "context_length_exceeded"
    assert session.result()["metadata"]["exhausted_budget"] == "max_context_len"
    # An agent that shortens its messages continues.
    session.commit(prepare(session, "one"), [generation("A")])
    for each in (session, reopen(tmp_path, session)):
        assert "exhausted_budget" not in each.result()["metadata"] and each.result()["status"] == "completed"


TOO_LONG = (
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 5000",
    "Input length (5000 tokens) exceeds the maximum allowed length (4096 tokens). Use a shorter input or enable",
    "input_ids must fit with max_new_tokens into 4096 tokens, got 5000 prompt tokens + max_new_tokens 1",
)
"""Messages of SGLang, and of the servers of this package."""


@pytest.mark.parametrize("reason", TOO_LONG)
def test_a_context_that_an_engine_refuses_is_a_budget(tmp_path: Path, reason: str) -> None:
    session = make_session(tmp_path)
    error = session.refusal(EngineError("engine 0 refused with status 400", status=400, reason=reason))
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert reason in str(error)
    for each in (session, reopen(tmp_path, session)):
        assert each.result()["metadata"]["exhausted_budget"] == "max_context_len"
        assert each.result()["status"] == "truncated"
    # An agent that shortens its messages continues.
    session.commit(prepare(session, "one"), [generation("A")])
    assert "exhausted_budget" not in session.result()["metadata"]


def test_another_refusal_of_an_engine_uses_up_no_budget(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    error = session.refusal(EngineError("engine 0 refused", status=400, reason="min_p must be 0"))
    assert (error.status, error.code) == (400, None) and "min_p must be 0" in str(error)
    assert "exhausted_budget" not in session.result()["metadata"]


def test_a_failed_call_is_known_until_one_is_answered(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    session.note_failure(EngineError("engine 0 must answer, got nothing"))
    assert session.result()["metadata"]["failed_call"] == "EngineError: engine 0 must answer, got nothing"
    session.commit(prepare(session, "one"), [generation("A")])
    assert "failed_call" not in session.result()["metadata"]


def test_a_finished_session_takes_no_answer(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    call = prepare(session, "one")
    session.finish()
    with pytest.raises(InvalidRequest, match="has ended"):
        session.commit(call, [generation("A")])
    assert reopen(tmp_path, session).is_finished


def test_keys() -> None:
    keys, others = SessionKeys(b"a" * 32), SessionKeys(b"b" * 32)
    one, two = new_session_id(), new_session_id()
    assert keys.session_of(keys.key_of(one)) == one
    wrong = [
        "",
        one,
        f"{one}.",
        f"{two}.{keys.key_of(one).partition('.')[2]}",
        others.key_of(one),
        keys.key_of("../etc/passwd"),
        keys.key_of(one) + "0",
        f"{one}.\u00e9",
    ]
    assert [keys.session_of(key) for key in wrong] == [None] * len(wrong)


@pytest.mark.parametrize("change", [{"id": "../a"}, {"seed": "x"}, {"params": {"no": 1}}, {"prompt": None}])
def test_a_wrong_session_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="a session must have all fields"):
        SessionSpec.from_json({**make_spec().to_json(), **change})


def test_images_are_known_by_hash_and_survive_in_the_file(tmp_path: Path) -> None:
    model = open_vision_model(tmp_path / "model")
    codec = Codec(renderer=model.renderer, images=model.images)
    spec = make_spec(prompt=model.prompt(draw(32, 32, seed=1)))
    session = Session(spec, codec, SessionLog(tmp_path, spec.id))
    session.begin()
    part = {"type": "image_url", "image_url": {"url": to_data_url(draw(32, 32, seed=2))}}
    call = session.prepare(parse_chat({"messages": [{"role": "user", "content": [part]}]}), fingerprint="a", time_s=1)
    assert [image.data_url() for image in call.prepared.images] == [part["image_url"]["url"]]
    session.commit(call, [generation("two")])
    settings, *lines = SessionLog(tmp_path, spec.id).read()
    restored = Session(SessionSpec.from_json(settings["session"]), codec, SessionLog(tmp_path, spec.id))
    restored.replay(lines)
    for each in (session, restored):
        (sample,) = trajectory_from_json(json.loads(json.dumps(each.result()))).samples()
        assert [image.data_url() for image in sample.images] == [part["image_url"]["url"]]
        # The messages are those of this conversation, with the picture by its hash.
        assert sample.turns[0].messages[0]["content"] == [{"type": "image", "image": sample.images[0].digest}]


def test_sampled_placeholders_end_the_attempt_by_the_policy(tmp_path: Path) -> None:
    model = open_vision_model(tmp_path / "model")
    spec = make_spec(prompt=model.prompt())
    session = Session(spec, Codec(renderer=model.renderer, images=model.images), SessionLog(tmp_path, spec.id))
    session.begin()
    first = {"role": "user", "content": "draw"}
    call = session.prepare(parse_chat({"messages": [first]}), fingerprint="a", time_s=1)
    written = replace(generation(""), output_ids=[model.images.processor.layout.image_token])
    written = replace(written, logprobs=[-1.0], weight_versions=[3])
    message = session.commit(call, [written]).choices[0].answer.to_message()
    part = {"type": "image_url", "image_url": {"url": to_data_url(draw(32, 32))}}
    later = parse_chat({"messages": [first, message, {"role": "user", "content": [part]}]})
    with pytest.raises(RenderError, match="placeholders of images, which it wrote"):
        session.prepare(later, fingerprint="b", time_s=2)
    restored = Session(spec, Codec(renderer=model.renderer, images=model.images), SessionLog(tmp_path, spec.id))
    restored.replay(SessionLog(tmp_path, spec.id).read()[1:])
    for each in (session, restored):
        result = trajectory_from_json(each.result())
        assert result.status == SampleStatus.truncated
        assert "which it wrote" in result.metadata[SAMPLED_PLACEHOLDERS]
