"""The tree of the common prefixes of samples."""

import numpy as np
import pytest

from rlscale.data.prefix_tree import MIN_SHARED_TOKENS, PrefixTree, build_prefix_tree, mix_routes


def tree_of(samples: list[list[int]], prompt_lens: list[int] | None = None) -> PrefixTree:
    lengths = np.asarray([len(sample) for sample in samples], dtype=np.int64)
    return build_prefix_tree(
        np.concatenate(samples).astype(np.int32),
        np.cumsum(lengths) - lengths,
        lengths,
        np.asarray(prompt_lens or [1] * len(samples), dtype=np.int64),
    )


def test_depth_first_order_and_common_tokens_by_hand() -> None:
    tree = tree_of([[1, 2, 6], [1, 2, 3, 5], [9], [1, 2, 3, 4], [1, 2, 3, 4]])
    assert tree.order.tolist() == [3, 4, 1, 0, 2]
    assert tree.shared.tolist() == [0, 4, 3, 2, 0]
    assert tree.has_shared() and not tree_of([[1], [2]]).has_shared()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_tokens_of_several_bytes_share_whole_tokens_only(dtype: type) -> None:
    # The bytes of 256 and 257 begin, or end, alike.
    tokens, lengths = np.asarray([5, 256, 5, 257, 5, 65536], dtype=dtype), np.asarray([2, 2, 2])
    tree = build_prefix_tree(tokens, np.asarray([0, 2, 4]), lengths, np.asarray([1, 1, 1]))
    assert tree.shared.tolist() == [0, 1, 1]


@pytest.mark.parametrize(("common", "shared"), [(MIN_SHARED_TOKENS - 1, 0), (MIN_SHARED_TOKENS, MIN_SHARED_TOKENS)])
def test_other_prompts_share_long_prefixes_only(common: int, shared: int) -> None:
    first, second = ([7] * common + [end] * 40 for end in (1, 2))
    assert tree_of([first, second], [90, 95]).shared.tolist() == [0, shared]
    assert tree_of([first, second], [90, common]).shared.tolist() == [0, common]  # a whole prompt is shared in any case


def test_tokens_of_other_routes_have_other_keys() -> None:
    tokens = np.asarray([5, 5, 5, 5, 6], dtype=np.int32)
    routes = np.asarray([[[0, 1], [2, 3]]] * 5, dtype=np.uint8)
    routes[1, 1] = 3, 2  # another order
    routes[2, 0, 0], routes[2, 1, 0] = 2, 0  # the same numbers in other layers
    keys = mix_routes(tokens, routes)
    assert keys.dtype == np.int64
    assert [int(np.flatnonzero(keys == key)[0]) for key in keys] == [0, 1, 2, 0, 4]
