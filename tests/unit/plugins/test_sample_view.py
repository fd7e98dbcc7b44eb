import json

import pytest

from rlscale.plugins.sample_view import DocumentSample, copy_changes, document_status, to_document
from rlscale.types import SampleStatus
from tests.unit.plugins.document_cases import make_group


def test_a_sample_has_the_attributes_of_slime() -> None:
    (native,) = make_group(1.0).samples
    native.metadata["seen"] = True
    sample = to_document(native)
    assert (sample.index, sample.group_index, sample.rollout_id) == (0, 0, 0)
    assert (sample.prompt, sample.label, sample.response, sample.reward) == ("1+1=", "2", "2", 1.0)
    assert (sample.tokens, sample.response_length, sample.loss_mask) == ([4, 11, 4, 12, 5, 2], 2, [1, 1])
    assert (sample.rollout_log_probs, sample.weight_versions) == ([-0.5, -0.25], ["7", "8"])
    assert sample.metadata == {"level": 3, "tags": ["a"], "seen": True}
    assert sample.status == DocumentSample.Status.COMPLETED
    assert sample.status.value == "completed"
    assert sample.effective_response_length == 2


def test_the_reward_value_is_that_of_the_key() -> None:
    class Keyed:
        reward_key = "exact"

    class Plain:
        reward_key = None

    sample = DocumentSample(reward={"exact": 0.5, "format": 1.0})
    assert sample.get_reward_value(Keyed) == 0.5
    assert DocumentSample(reward=0.25).get_reward_value(Plain) == 0.25


def test_a_sample_survives_a_dict_with_its_further_attributes() -> None:
    sample = DocumentSample(index=3, tokens=[1, 2], status=DocumentSample.Status.TRUNCATED)
    sample.tool_calls = 4  # type: ignore[attr-defined]
    sample.spec_info.spec_verify_ct = 2
    other = DocumentSample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert other == sample
    assert other.tool_calls == 4  # type: ignore[attr-defined]
    assert sample.status == DocumentSample.Status.TRUNCATED  # not changed by to_dict


def test_response_tokens_extend_every_column() -> None:
    sample = DocumentSample(tokens=[1, 2])
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "3", "cached_tokens": 1, "prompt_tokens": 2}
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-1.0, -2.0], meta_info=meta, text="ab")
    sample.append_response_tokens(tokens=[9], trainable=False)
    assert (sample.tokens, sample.response, sample.response_length) == ([1, 2, 3, 4, 9], "ab", 3)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0], [-1.0, -2.0, 0.0])
    assert (sample.status, sample.weight_versions) == (DocumentSample.Status.COMPLETED, ["3"])
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.5
    assert sample.effective_response_length == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": [1]}, "log_probs must be given"),
        ({"tokens": [1], "log_probs": [-1.0, -2.0]}, "must be 1 numbers"),
        ({"tokens": [1], "log_probs": [-1.0], "trainable": False}, "must not be given"),
    ],
)
def test_tokens_without_their_logprobs_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DocumentSample().append_response_tokens(**values)  # type: ignore[arg-type]


def test_changes_reach_the_sample() -> None:
    (native,) = make_group(1.0).samples
    sample = to_document(native)
    sample.loss_mask = [0, 1]
    sample.metadata["note"], sample.metadata["level"] = "x", 4
    copy_changes(sample, native)
    assert list(native.loss_mask) == [0, 1]
    assert native.metadata == {"note": "x", "level": 4}  # that of the row stays in the prompt
    assert native.prompt.metadata["level"] == 3
    sample.remove_sample = True
    copy_changes(sample, native)
    assert list(native.loss_mask) == [0, 0]
    assert type(native.loss_mask) is type(make_group(1.0).samples[0].loss_mask)


@pytest.mark.parametrize("mask", [[1], [1, 2], [1, 1, 1]])
def test_a_wrong_mask_is_refused(mask: list[int]) -> None:
    (native,) = make_group(1.0).samples
    sample = to_document(native)
    sample.loss_mask = mask
    with pytest.raises(ValueError, match="loss_mask of sample 0 must be 2 values of 0 or 1"):
        copy_changes(sample, native)


def test_a_status_may_be_a_string() -> None:
    assert document_status("truncated") == document_status(DocumentSample.Status.TRUNCATED) == SampleStatus.truncated
    with pytest.raises(ValueError):
        document_status("finished")
