"""The output layer for large vocabularies computes the logprobs of plain logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlscale.algo.linear_distillation import HiddenTeacher, TeacherRequest, TopTeacher
from rlscale.algo.linear_logprobs import HeadOptions, top_logprobs_from_hidden
from rlscale.config import ComputeDtype, ModelBuild, ModelConfig
from rlscale.errors import ConfigError
from rlscale.models.hf_models import load_causal_lm
from rlscale.models.resolve_model import resolve_model
from rlscale.training.attention.packed import PACKED_ATTENTION
from rlscale.training.fsdp.backend import FsdpBackend
from rlscale.training.fsdp.step import compute_policy_terms
from rlscale.training.modules.logprob_head import MIN_VOCABULARY, LogprobHead, output_layer, replace_with_logprob_head
from rlscale.training.packing.microbatch import pack
from tests.unit.training.rollouts import RAGGED, make_batch, plan, spec

BATCH = make_batch(RAGGED)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def large_vocabulary(cache: Path, request: pytest.FixtureRequest) -> str:
    config = ModelConfig(
        build=ModelBuild.tiny_qwen3,
        cache_dir=str(cache),
        num_layers=1,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=MIN_VOCABULARY + 1,
        tie_word_embeddings=request.param,
    )
    return resolve_model(config)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_logprobs_and_gradients_are_those_of_plain_logits(large_vocabulary: str, entropy_grad: bool) -> None:
    micro = pack(BATCH, range(len(RAGGED)), device=torch.device("cpu"))
    models = [
        load_causal_lm(large_vocabulary, dtype=torch.float32, attn_implementation=PACKED_ATTENTION) for _ in range(2)
    ]
    assert replace_with_logprob_head(models[0])
    found = [compute_policy_terms(model, micro, temperature=0.8, entropy_grad=entropy_grad) for model in models]
    torch.testing.assert_close(found[0][:2], found[1][:2], atol=1e-5, rtol=1e-5)
    for logprobs, entropy, _ in found:
        (logprobs.sum() + (entropy.square().sum() if entropy_grad else 0.0)).backward()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-3, rtol=1e-4)


class MaxColumns(TorchDispatchMode):
    """Largest number of columns of a tensor with `num_rows` rows."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows, self.most = num_rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor) and self.num_rows in x.shape]
        self.most = max([self.most, *(size // self.num_rows for size in sizes)])
        return out


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_logits_of_all_tokens_never_exist(large_vocabulary: str, entropy_grad: bool) -> None:
    micro = pack(BATCH, range(len(RAGGED)), device=torch.device("cpu"))
    model = load_causal_lm(large_vocabulary, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    assert replace_with_logprob_head(model, chunk_tokens=8)
    # Chunks of 8 tokens: no tensor has logits of more.
    num_tokens = len(micro.targets)
    with MaxColumns(num_tokens) as seen:
        logprobs, entropy, _ = compute_policy_terms(model, micro, temperature=0.8, entropy_grad=entropy_grad)
        (logprobs.sum() + entropy.sum()).backward()
    assert 0 < seen.most * num_tokens <= 8 * (MIN_VOCABULARY + 1)


@pytest.mark.parametrize("is_full", [False, True])
def test_logits_of_all_tokens_of_a_teacher_never_exist(large_vocabulary: str, is_full: bool) -> None:
    micro = pack(BATCH, range(len(RAGGED)), device=torch.device("cpu"))
    model = load_causal_lm(large_vocabulary, dtype=torch.float32, attn_implementation=PACKED_ATTENTION)
    assert replace_with_logprob_head(model, chunk_tokens=8)
    num_tokens, vocab_size = len(micro.targets), model.config.vocab_size
    hidden, table = torch.randn(num_tokens, 16), torch.randn(vocab_size, 16)
    options = HeadOptions(chunk_tokens=8)
    with MaxColumns(num_tokens) as seen:
        ids, logits, norms = top_logprobs_from_hidden(hidden, table, num_top=4, options=options)
        top = TopTeacher(ids_TK=ids, logprobs_TK=logits - norms[:, None])
        teacher = TeacherRequest(rows=HiddenTeacher(hidden_TG=hidden, weight_VG=table) if is_full else top)
        terms = compute_policy_terms(model, micro, temperature=1.0, entropy_grad=False, teacher=teacher)
        assert terms.teacher_kl is not None
        terms.teacher_kl.sum().backward()
    assert 0 < seen.most * num_tokens <= 8 * vocab_size
    expected = torch.log_softmax(hidden @ table.T, dim=-1).topk(4, dim=-1)
    torch.testing.assert_close(top.logprobs_TK, expected.values, atol=1e-5, rtol=1e-5)
    assert torch.equal(top.ids_TK, expected.indices)


def test_a_small_vocabulary_and_unknown_architectures_keep_their_logits(model_path: str, large_vocabulary: str) -> None:
    assert not replace_with_logprob_head(load_causal_lm(model_path, dtype=torch.float32))
    unknown = load_causal_lm(large_vocabulary, dtype=torch.float32)
    unknown.config.model_type = "one_that_scales_its_logits"
    assert not replace_with_logprob_head(unknown)
    chunked = load_causal_lm(model_path, dtype=torch.float32)
    assert replace_with_logprob_head(chunked, chunk_tokens=5)
    head = output_layer(chunked)
    assert isinstance(head, LogprobHead) and head.chunk_tokens == 5
    with pytest.raises(ConfigError, match=r"train\.log_probs_chunk_size must be -1 with a model of the type"):
        replace_with_logprob_head(unknown, chunk_tokens=5)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("dtype", [ComputeDtype.float32, ComputeDtype.bfloat16])
def test_a_sharded_model_trains_with_it(large_vocabulary: str, dtype: ComputeDtype) -> None:
    trainer = FsdpBackend(spec(large_vocabulary, dtype=dtype, lr=1e-3), rank=0, world_size=1)
    assert isinstance(output_layer(trainer.policy.model), LogprobHead)
    result = trainer.train(BATCH, [plan(BATCH, [[[*range(8)]]])])
    assert result.steps[0]["grad_norm"] > 0
    assert result.steps[0]["entropy"] == pytest.approx(torch.tensor(MIN_VOCABULARY).log().item(), abs=0.1)
