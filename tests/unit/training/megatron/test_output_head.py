"""The output layer of Megatron-core for a loss that reads logits."""

import pytest
import torch

from rlscale.training.megatron.model.output_head import OutputHead
from rlscale.training.packing.microbatch import pack
from tests.unit.training.rollouts import RAGGED, make_batch

VOCABULARY, PADDED, WIDTH = 15, 32, 8


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_terms_with_logits_equal_those_without(temperature: float) -> None:
    micro = pack(make_batch(RAGGED), range(4), device=torch.device("cpu"))
    head = OutputHead(vocab_size=VOCABULARY, first_token=0, temperature=temperature)
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, micro.input_ids.shape[1], WIDTH), torch.randn(PADDED, WIDTH)
    gradients = []
    for with_logits in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if with_logits:
            logprobs, entropy, logits = head.loss_terms(h, w, micro=micro, entropy_grad=True)
            assert logits.shape == (len(micro.targets), VOCABULARY)
            torch.testing.assert_close(logits.log_softmax(-1).gather(1, micro.targets[:, None])[:, 0], logprobs)
        else:
            logprobs, entropy = head.logprobs_and_entropy(h, w, micro=micro, entropy_grad=True)
        (logprobs.sum() - 0.3 * entropy.sum()).backward()
        assert h.grad is not None and w.grad is not None
        gradients.append((logprobs.detach(), entropy.detach(), h.grad, w.grad))
    for plain, same in zip(*gradients, strict=True):
        torch.testing.assert_close(same, plain, atol=1e-5, rtol=1e-4)
