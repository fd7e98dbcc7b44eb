"""Options of the GPU kernel, whose signature differs between versions of torch."""

import pytest

from rlscale.training.attention.varlen_kernel import varlen_options

# Parameters of `varlen_attn` beyond tensors and lengths: torch 2.9, 2.11, 2.13.
FIRST = {"is_causal", "return_aux"}
WINDOWED = {"return_aux", "scale", "window_size"}
NEWEST = {"return_aux", "scale", "window_size", "enable_gqa"}


@pytest.mark.parametrize(
    ("parameters", "window", "options"),
    [
        (FIRST, None, {"is_causal": True}),
        (WINDOWED, None, {"scale": 0.5, "window_size": (-1, 0)}),
        (WINDOWED, 8, {"scale": 0.5, "window_size": (7, 0)}),
        (NEWEST, 8, {"scale": 0.5, "window_size": (7, 0), "enable_gqa": True}),
    ],
)
def test_the_gpu_kernel_gets_the_options_that_its_torch_has(
    parameters: set[str], window: int | None, options: dict[str, object]
) -> None:
    assert varlen_options(parameters, scale=0.5, window=window) == options


def test_a_window_needs_a_torch_with_windows() -> None:
    with pytest.raises(ValueError, match=r"fsdp\.attn_implementation must be eager for a sliding window"):
        varlen_options(FIRST, scale=0.5, window=8)
