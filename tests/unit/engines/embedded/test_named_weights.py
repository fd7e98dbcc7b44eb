"""Tensors that the engine receives: those of its model, and those of layers that it does not compute."""

from functools import partial

import pytest
import torch

from rlscale.architectures.family import find_family
from rlscale.engines.embedded.named_weights import NamedWeights
from rlscale.engines.server.generate_request import BadRequest
from rlscale.weights.buckets import describe_bucket

PROJECTION = torch.ones(4, 8)


def test_layers_for_multi_token_prediction_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    mtp = find_family("mimo").mtp
    assert mtp is not None
    norm = torch.zeros(4)
    weights = NamedWeights({"model.norm.weight": norm}, {}, is_unused=partial(mtp.has, num_layers=2))
    names = ["model.norm.weight", "model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.mlp.up_proj.weight"]
    bucket = describe_bucket(list(zip(names, (torch.ones(4), PROJECTION, PROJECTION), strict=True)))
    own, *scratch = weights.targets(bucket)
    assert own is norm and [each.shape for each in scratch] == [PROJECTION.shape] * 2
    assert [record.message.count("model.mtp_layers.0.input_proj.weight") for record in caplog.records] == [1]
    assert not weights.missing(weights.own_names(names))
    with pytest.raises(BadRequest, match="names must be weights of this model"):
        weights.targets(describe_bucket([("model.layers.2.mlp.up_proj.weight", PROJECTION)]))


def test_layers_of_published_checkpoints_are_recognised() -> None:
    mtp = find_family("deepseek_v3").mtp
    assert mtp is not None
    assert mtp.has("model.layers.61.enorm.weight", num_layers=61)
    assert not mtp.has("model.layers.60.self_attn.o_proj.weight", num_layers=61)
    assert not mtp.has("model.norm.weight", num_layers=61)
    copies = mtp.copies_of("lm_head.weight", num_layers=61, num_mtp=1)
    assert list(copies) == ["model.layers.61.shared_head.head.weight"]
