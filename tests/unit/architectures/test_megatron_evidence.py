"""The reasons for which docs/how-to/megatron.md says that Megatron-core cannot do something."""

from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "megatron.md"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("ssm/gated_delta_net.py", "GDN does not support packed sequence for now"),
        ("transformer/dot_product_attention.py", "Packed sequence is not supported by DotProductAttention."),
        ("transformer/transformer_config.py", "Bias in Moe is only supported when ETP==1"),
        ("transformer/experimental_attention_variant/dsa.py", "Packed sequence is not supported for DSAttention"),
        ("transformer/experimental_attention_variant/dsa.py", "fast_hadamard_transform"),
        ("transformer/transformer_config.py", "fused_single_qkv_rope does not support gated attention for now."),
        ("transformer/moe/experts.py", "bias not supported in Grouped GEMM yet"),
        ("extensions/transformer_engine.py", "qk-clip is only supported in TE 2.9.0 and later"),
        ("model_parallel_config.py", "when gradient accumulation fusion is not used"),
        ("model_parallel_config.py", "This will be set automatically according to the pipeline layout"),
    ],
)
def test_megatron_core_says_what_the_page_quotes(file: str, text: str) -> None:
    spec = find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations
    # A version that no longer says so may be able to do it.
    assert text in (Path(spec.submodule_search_locations[0]) / file).read_text()
    assert text in " ".join(PAGE.read_text().split())
