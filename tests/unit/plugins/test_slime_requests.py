import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from rlscale.config import load_config
from rlscale.plugins.args_view import Args
from rlscale.plugins.sample_view import DocumentSample
from rlscale.plugins.slime_generation import generate
from rlscale.plugins.slime_requests import (
    current_session,
    engine_address,
    from_document_params,
    get_model_url,
    post,
    to_document_params,
)
from rlscale.types import Generation, SamplingParams

PARAMS = SamplingParams(max_new_tokens=8, temperature=0.7, stop=("\n",), sampling_seed=3)


class CodeTokenizer:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))


@dataclass
class Session:
    """Answers each request with two tokens."""

    params: SamplingParams = PARAMS
    tokenizer: Any = field(default_factory=CodeTokenizer)
    requests: list[tuple[list[int], SamplingParams]] = field(default_factory=list)

    async def generate(self, token_ids: list[int], params: SamplingParams | None = None) -> Generation:
        assert params is not None
        self.requests.append((token_ids, params))
        return Generation(
            output_ids=[50, 51],
            logprobs=[-0.5, -0.25],
            weight_versions=[6, 7],
            finish_reason="length",
            text="23",
            engine="engine 0",
        )


@dataclass
class Arguments:
    sglang_router_ip: str = "127.0.0.1"
    sglang_router_port: int = 30000
    sglang_server_concurrency: int = 4
    rollout_num_engines: int = 2
    hf_checkpoint: str = "none"


def within(session: Session, call: Any) -> Any:
    async def run() -> Any:
        current_session.set(session)
        engine_address.set(("127.0.0.1", 30000))
        return await call()

    return asyncio.run(run())


def test_parameters_have_the_names_of_slime_and_survive_a_round_trip() -> None:
    given = to_document_params(PARAMS)
    assert (given["max_new_tokens"], given["temperature"], given["stop"], given["stop_token_ids"]) == (
        8,
        0.7,
        ["\n"],
        None,
    )
    assert (given["no_stop_trim"], given["sampling_seed"]) == (True, 3)
    again = from_document_params(given, PARAMS)
    assert (again.stop, again.stop_token_ids, again.sampling_seed, again.no_stop_trim) == (("\n",), (), 3, True)
    assert from_document_params({"stop": "</a>", "max_new_tokens": 2}, PARAMS).stop == ("</a>",)
    assert from_document_params({"stop": None}, PARAMS).stop == ()
    with pytest.raises(ValueError, match=r"must have the names .*, got custom_params"):
        from_document_params({"custom_params": {}}, PARAMS)


@pytest.mark.parametrize("prompt", [{"input_ids": [49, 43]}, {"text": "1+"}])
def test_a_request_to_the_engines_joins_the_trajectory(prompt: dict[str, Any]) -> None:
    session = Session()
    payload = {**prompt, "sampling_params": {"max_new_tokens": 4, "stop": None}}
    reply = within(session, lambda: post("http://127.0.0.1:30000/generate", payload))
    ((token_ids, params),) = session.requests
    assert token_ids == [49, 43] and (params.max_new_tokens, params.stop, params.temperature) == (4, (), 0.7)
    meta = reply["meta_info"]
    assert (reply["text"], reply["output_ids"]) == ("23", [50, 51])
    assert meta["output_token_logprobs"] == [[-0.5, 50, None], [-0.25, 51, None]]
    assert (meta["finish_reason"]["type"], meta["weight_version"], meta["prompt_tokens"]) == ("length", "7", 2)


def test_a_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="must have input_ids or text, got"):
        within(Session(), lambda: post("http://127.0.0.1:30000/generate", {"messages": []}))


def test_the_default_generation_fills_a_sample() -> None:
    session, sample = Session(), DocumentSample(prompt="1+")
    params = to_document_params(PARAMS)
    within(session, lambda: generate(Arguments(), sample, params))
    assert (sample.tokens, sample.response, sample.loss_mask) == ([49, 43, 50, 51], "23", [1, 1])
    assert (sample.status, sample.weight_versions) == (DocumentSample.Status.TRUNCATED, ["7"])
    # The rest of the response: the parameters count the tokens so far.
    within(session, lambda: generate(Arguments(), sample, params))
    assert session.requests[1][0] == [49, 43, 50, 51] and session.requests[1][1].max_new_tokens == 6
    assert sample.response_length == 4


def test_only_the_policy_has_a_url() -> None:
    config = load_config([])
    runtime = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": 30000, "sglang_reward_model": "judge"}
    args = Args(config, runtime=runtime)
    assert get_model_url(args, "actor", "/v1/models") == "http://127.0.0.1:30000/v1/models"
    with pytest.raises(ValueError, match="must name the policy, got judge"):
        get_model_url(args, "judge")
    args = Args(config, runtime={**runtime, "sglang_frozen_models": ["ref"]})
    with pytest.raises(ValueError, match=r"got ref; ask that model as session\.model\('ref'\)"):
        get_model_url(args, "ref")
