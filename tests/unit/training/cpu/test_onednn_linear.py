"""Linear layers through oneDNN compared with plain ones."""

import pytest
import torch
from torch import nn

from rlscale.training.cpu.onednn_linear import OneDnnLinear, few_rows, use_onednn


def pair_of_layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain, fast = nn.Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False)
    fast.load_state_dict(plain.state_dict())
    assert use_onednn(nn.Sequential(fast)) == 1
    assert type(fast) is OneDnnLinear
    return plain, fast


@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24), (1, 1, 24), (8, 24), (67, 24), (3, 47, 24), (160, 24)])
def test_value_and_gradients_are_those_of_a_plain_layer(shape: tuple[int, ...]) -> None:
    plain, fast = pair_of_layers()
    x = torch.randn(shape)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(i) for layer, i in zip((plain, fast), inputs, strict=True)]
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-6, rtol=1e-5)
    weights = torch.randn_like(outputs[0]).transpose(-1, -2).contiguous().transpose(-1, -2)  # a strided gradient
    for output in outputs:
        output.backward(weights)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast.weight.grad, plain.weight.grad, atol=1e-5, rtol=1e-5)


def test_micro_batches_of_all_sizes_need_few_shapes() -> None:
    # oneDNN keeps code and memory for each shape.
    sizes = [few_rows(number) for number in range(4097)]
    assert len(set(sizes)) <= 64
    assert all(number <= size <= max(number + 7, 1.125 * number) for number, size in enumerate(sizes))
    assert [few_rows(number) for number in (1, 8, 9, 128, 129, 250, 1500)] == [8, 8, 16, 128, 144, 256, 1536]


def test_bfloat16_uses_the_default_kernel() -> None:
    plain, fast = (layer.bfloat16() for layer in pair_of_layers())
    x = torch.randn(3, 24, dtype=torch.bfloat16)
    assert torch.equal(fast(x), plain(x))


def test_layers_with_a_bias_and_subclasses_are_unchanged() -> None:
    class Own(nn.Linear):
        pass

    assert use_onednn(nn.Sequential(nn.Linear(2, 3), Own(2, 3, bias=False))) == 0
