"""Splitting weights into buckets, packing and unpacking them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlscale.weights.buckets import allocate_flat, pack, split_into_buckets, unpack

CPU = torch.device("cpu")


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=20), max_bytes=st.integers(8, 300)
)
def test_every_tensor_arrives_unchanged_and_buckets_keep_their_size(
    sizes: list[tuple[int, bool]], max_bytes: int
) -> None:
    weights = {
        f"w{i}": torch.randn(n).to(torch.bfloat16 if half else torch.float32) for i, (n, half) in enumerate(sizes)
    }
    arrived = {}
    for named in split_into_buckets(iter(weights.items()), max_bytes):
        packed = pack(named, CPU)
        assert packed.flat.nbytes <= max_bytes or len(named) == 1
        assert len(set(packed.bucket.dtypes)) == 1
        # As on the receiving side: a buffer of the same layout gets the bytes.
        flat = allocate_flat(packed.bucket, CPU).copy_(packed.flat)
        arrived.update(unpack(packed.bucket, flat))
    assert arrived.keys() == weights.keys()
    for name, tensor in weights.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)


def test_tensors_are_one_after_the_other() -> None:
    packed = pack([("a", torch.tensor([[1.0, 2.0]])), ("b", torch.tensor(3.0))], CPU)
    assert packed.bucket.names == ["a", "b"]
    assert packed.bucket.dtypes == ["float32", "float32"]
    assert packed.bucket.shapes == [[1, 2], []]
    assert packed.flat.view(torch.float32).tolist() == [1.0, 2.0, 3.0]
