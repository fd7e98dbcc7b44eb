"""Generate functions in slime's form, with the engine of an example."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from rlscale.plugins.args_view import Args
from rlscale.plugins.example_session import ExampleSession
from rlscale.plugins.generate_adapter import DocumentGenerate
from rlscale.plugins.sample_view import DocumentSample, to_document
from rlscale.plugins.slime_requests import post
from rlscale.trajectory import Trajectory
from rlscale.types import Generation, Prompt, SampleStatus, SamplingParams
from tests.unit.config.rules.valid_config import config_with

ARGS = Args(config_with({"custom": {"bonus": 2.0}, "sampling.partial_rollout": True}))
PROMPT = Prompt(index=0, text="1+1=", token_ids=tuple(map(ord, "1+1=")), label="2", metadata={"level": 3})


class Session(ExampleSession):
    """The answers of a list; version k made the tokens of answer k."""

    def __init__(self, *answers: tuple[str, str]) -> None:
        super().__init__()
        self.answers = list(answers)
        self.sent: list[tuple[str, SamplingParams | None]] = []

    async def generate(self, token_ids: Any, params: SamplingParams | None = None) -> Generation:
        text, reason = self.answers[len(self.sent)]
        self.sent.append((self.tokenizer.decode(token_ids), params))
        return Generation(
            output_ids=self.tokenizer.encode(text),
            logprobs=[-0.25] * len(text),
            weight_versions=[len(self.sent)] * len(text),
            finish_reason=reason,
            text=text,
            engine="engine 0",
        )


def generate(function: Callable[..., Any], session: Session, trajectory: Trajectory | None = None) -> Trajectory:
    trajectory = trajectory or Trajectory(id=9, group_index=4, prompt=PROMPT, seed=1)
    asyncio.run(DocumentGenerate(function, ARGS)(trajectory, session))
    return trajectory


async def request(args: Any, prompt: str, params: Any) -> Any:
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    return await post(url, {"text": prompt, "sampling_params": params, "return_logprob": True})


async def with_a_tool(args: Any, sample: Any, sampling_params: Any) -> Any:
    """Two requests with the output of a tool in between, as in slime's documentation."""
    sample.tokens = list(map(ord, sample.prompt))
    for tool_output in (" 4 ", ""):
        output = await request(args, "".join(map(chr, sample.tokens)), sampling_params)
        pairs = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[pair[1] for pair in pairs],
            log_probs=[pair[0] for pair in pairs],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        if output["meta_info"]["finish_reason"]["type"] != "stop":
            return sample
        sample.append_response_tokens(args, tokens=list(map(ord, tool_output)), trainable=False, text=tool_output)
    sample.metadata["turns"] = 2
    sample.tool_calls = 1
    return sample


def test_turns_and_tools_become_columns_with_the_weights_of_each_request() -> None:
    trajectory = generate(with_a_tool, Session(("2+2", "stop"), ("=4", "stop")))
    (sample,) = trajectory.samples()
    assert (sample.response, sample.status) == ("2+2 4 =4", SampleStatus.completed)
    assert sample.loss_mask.tolist() == [1, 1, 1, 0, 0, 0, 1, 1]
    assert sample.weight_versions.tolist() == [1, 1, 1, 1, 1, 1, 2, 2]
    assert sample.rollout_logprobs.tolist() == [-0.25] * 3 + [0.0] * 3 + [-0.25] * 2
    assert (sample.prompt, sample.reward, sample.index) == (PROMPT, None, 9)
    # What a function adds reaches the reward, which gets another copy.
    again = to_document(sample)
    assert (again.metadata, again.tool_calls) == ({"level": 3, "turns": 2}, 1)  # type: ignore[attr-defined]


def plain(args: Any, sample: Any, sampling_params: Any, evaluation: bool) -> Any:
    sample = asyncio.run(with_a_tool(args, sample, sampling_params))
    sample.reward = args.bonus + evaluation
    return sample


def test_a_plain_function_runs_in_a_thread_and_may_set_the_reward() -> None:
    trajectory = generate(plain, Session(("2", "stop"), ("3", "length")))
    (sample,) = trajectory.samples()
    assert (sample.reward, sample.status, sample.weight_versions[-1]) == (2.0, SampleStatus.truncated, 2)


def test_a_function_knows_whether_its_trajectory_is_part_of_an_evaluation() -> None:
    session = Session(("2", "stop"), ("3", "length"))
    session.is_evaluation = True
    (sample,) = generate(plain, session).samples()
    assert sample.reward == 3.0


async def with_agents(args: Any, sample: Any, sampling_params: Any) -> Any:
    """Two solvers with equal requests, and a third agent with another prompt; the last continues the first."""
    found = []
    for prompt, reward in (("1+1=", 0.0), ("1+1=", 1.0), ("select:", 2.0)):
        output = await request(args, prompt, sampling_params)
        each = copy.deepcopy(sample)
        each.prompt, each.tokens = prompt, list(map(ord, prompt))
        pairs = output["meta_info"]["output_token_logprobs"]
        each.append_response_tokens(args, tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs])
        each.response, each.reward, each.status = output["text"], reward, DocumentSample.Status.COMPLETED
        found.append(each)
    longer = copy.deepcopy(found[0])
    longer.append_response_tokens(args, tokens=[33], trainable=False, text="!")
    return [*found, longer]


def test_several_samples_are_paths_with_their_own_prompts_and_train_each_token_once() -> None:
    session = Session(("2", "stop"), ("2", "stop"), ("1st", "stop"))
    samples = generate(with_agents, session).samples()
    assert [(each.prompt.text, each.response, each.path) for each in samples] == [
        ("1+1=", "2", 0),
        ("1+1=", "2", 1),
        ("select:", "1st", 2),
        ("1+1=", "2!", 3),
    ]
    assert [each.loss_mask.tolist() for each in samples] == [[1], [1], [1, 1, 1], [0, 0]]
    # Equal answers are two requests; the last sample repeats one of them.
    assert sorted(samples[0].weight_versions.tolist() + samples[1].weight_versions.tolist()) == [1, 2]
    assert samples[2].tokens.tolist() == list(map(ord, "select:1st"))
    assert {each.reward for each in samples} == {0.75} and {each.index for each in samples} == {9}
    seeds = [params.sampling_seed for _, params in session.sent if params is not None]
    assert len(set(seeds)) == 3, "equal requests get different answers"


def test_an_aborted_answer_is_kept_for_a_continuation_and_the_function_is_called_with_it() -> None:
    trajectory = generate(with_a_tool, Session(("2+", "abort")))
    assert trajectory.status == SampleStatus.aborted and trajectory.num_sampled == 2
    seen = []

    async def continued(args: Any, sample: Any, sampling_params: Any) -> Any:
        seen.append((sample.prompt, sample.response, sample.status.value))
        output = await request(args, sample.prompt + sample.response, sampling_params)
        pairs = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(args, tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs], text="2")
        sample.status = "completed"  # some functions set the value
        return sample

    trajectory = generate(continued, Session(("2", "stop")), trajectory)
    assert seen == [("1+1=", "2+", "aborted")]
    assert trajectory.samples()[0].response == "2+2" and trajectory.status == SampleStatus.completed


def returns(**values: Any) -> Callable[..., Any]:
    async def function(args: Any, sample: Any, sampling_params: Any) -> Any:
        given = {"tokens": [*map(ord, "1+1="), 50], "response_length": 1, "status": DocumentSample.Status.COMPLETED}
        return DocumentSample(**{**given, **values})

    return function


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (returns(), "must set rollout_log_probs of trainable tokens, got tokens that no request returned"),
        (returns(rollout_log_probs=[-1.0], loss_mask=[1, 1]), "loss_mask must be 1 values of 0 or 1, got 2"),
        (returns(rollout_log_probs=[-1.0, 0.0]), "rollout_log_probs must be 1 numbers, one for each token, got 2"),
        (returns(response_length=9), "must return the tokens of prompt and response"),
        (returns(rollout_log_probs=[-1.0], status="pending"), "must set sample.status, or send its requests by post"),
        (returns(rollout_log_probs=[-1.0], status="failed"), "a sample with the status failed"),
        (returns(rollout_log_probs=[-1.0], reward=float("nan")), "must set finite rewards .* got .nan. on 1 of 1"),
        (lambda *given: [], "must return a sample or a list of samples, got an empty list"),
        (lambda *given: None, "must return a sample or a list of samples, got NoneType"),
    ],
)
def test_a_result_that_cannot_be_trained_on_is_named(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(function, Session())


def test_tokens_of_another_client_count_as_made_by_the_oldest_weights() -> None:
    (sample,) = generate(returns(rollout_log_probs=[-1.0], weight_versions=["3", "5"]), Session()).samples()
    assert sample.weight_versions.tolist() == [3]
    (sample,) = generate(returns(rollout_log_probs=[-1.0], remove_sample=True), Session()).samples()
    assert sample.loss_mask.tolist() == [0]
