"""The radix tree of texts: prefixes, replaced answers, weight versions, and its limit."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlscale.engines.middleware_router.radix_tree import PROMPT_VERSION, Entry, RadixTree, collect_tokens


def answer(tree: RadixTree, text: str, ids: list[int], base: Entry, version: int = 1) -> Entry:
    logprobs = [-0.5 * (i + 1) for i in range(len(ids))]
    return tree.insert(text, ids, base=base, logprobs=logprobs, versions=[version] * len(ids))


def test_the_longest_prefix_has_the_tokens_of_all_turns() -> None:
    tree = RadixTree(max_tokens=100)
    first = answer(tree, "1+1=2.", [30, 31], tree.insert("1+1=", [1, 2]))
    second = tree.insert("1+1=2. 2+2=", [3], base=first)
    answer(tree, "1+1=2. 2+2=4", [32], second, version=2)
    found = tree.find("1+1=2. 2+2=4!")
    assert found is not None
    assert found.token_ids == [1, 2, 30, 31, 3, 32] and found.num_chars == 12
    assert found.loss_mask == [0, 0, 1, 1, 0, 1]
    assert found.logprobs == [0.0, 0.0, -0.5, -1.0, 0.0, -0.5]
    assert found.weight_versions == [PROMPT_VERSION] * 2 + [1, 1, PROMPT_VERSION, 2]


def test_a_text_that_ends_inside_an_answer_gets_the_entry_before_it() -> None:
    tree = RadixTree(max_tokens=100)
    answer(tree, "1+1=two", [9], tree.insert("1+1=", [1, 2]))
    assert [getattr(tree.find(text), "token_ids", None) for text in ("1+1=tw", "1+1", "2", "")] == [
        [1, 2],
        None,
        None,
        None,
    ]


def test_a_split_edge_keeps_the_tokens_of_both_texts() -> None:
    tree = RadixTree(max_tokens=100)
    prompt = tree.insert("ab", [1])
    for text, ids in (("abcde", [2, 3]), ("abcxy", [4]), ("abc", [5])):
        answer(tree, text, ids, prompt)
    found = {text: getattr(tree.find(text), "token_ids", None) for text in ("abcde", "abcxy", "abc", "abcd", "ab")}
    assert found == {"abcde": [1, 2, 3], "abcxy": [1, 4], "abc": [1, 5], "abcd": [1, 5], "ab": [1]}


def test_a_prompt_does_not_replace_an_answer_with_the_same_tokens() -> None:
    tree = RadixTree(max_tokens=100)
    given_answer = answer(tree, "ab", [2], tree.insert("a", [1]))
    assert tree.insert("ab", [1, 2]) is given_answer
    other = tree.insert("ab", [7])  # the client cut the text in another way, and the engine reads what it sends
    assert tree.longest("ab") is other and tree.num_tokens == 2


def test_a_replaced_answer_stays_for_those_that_extend_it() -> None:
    tree = RadixTree(max_tokens=100)
    prompt = tree.insert("a", [1])
    old = answer(tree, "ab", [2], prompt)
    tree.insert("abc", [3], base=old)
    new = answer(tree, "ab", [4, 5], prompt, version=2)
    assert tree.longest("ab") is new
    assert getattr(tree.find("abc"), "token_ids", None) == [1, 2, 3]
    assert tree.num_tokens == 5
    tree.remove_older(2)
    assert getattr(tree.find("abc"), "token_ids", None) == [1, 4, 5]
    assert (tree.num_tokens, tree.num_entries) == (3, 2)


def test_old_weight_versions_are_removed_and_prompts_stay() -> None:
    tree = RadixTree(max_tokens=100)
    prompt = tree.insert("a", [1])
    old = answer(tree, "ab", [2], prompt, version=3)
    tree.insert("ab?", [6], base=old)
    answer(tree, "ac", [3], prompt, version=4)
    assert tree.longest("ab?", oldest=4) is prompt
    assert collect_tokens(tree.longest("ab?", oldest=3) or prompt).token_ids == [1, 2, 6]
    tree.remove_older(4)
    assert tree.longest("ab?") is prompt
    assert getattr(tree.find("ac"), "token_ids", None) == [1, 3]


def test_the_entries_that_were_not_used_for_longest_leave_first() -> None:
    tree = RadixTree(max_tokens=4)
    first = tree.insert("a", [1])
    answer(tree, "ab", [2], first)
    answer(tree, "ac", [3], first)
    tree.longest("ab")
    tree.insert("z", [4, 5])
    assert [getattr(tree.find(text), "token_ids", None) for text in ("ab", "ac", "z")] == [[1, 2], [1], [4, 5]]
    assert tree.num_tokens == 4


def test_an_entry_that_left_while_its_answer_was_generated_counts_again() -> None:
    tree = RadixTree(max_tokens=3)
    prompt = tree.insert("a", [1])
    tree.insert("b", [2, 3, 4])
    assert tree.longest("a") is None
    answer(tree, "ac", [5], prompt)
    assert getattr(tree.find("ac"), "token_ids", None) == [1, 5]
    assert tree.num_tokens == 2


def test_clear_removes_everything() -> None:
    tree = RadixTree(max_tokens=10)
    tree.insert("a", [1])
    tree.clear()
    assert (tree.find("a"), tree.num_tokens, tree.num_entries, tree.num_clears) == (None, 0, 0, 1)


TEXTS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=30)


@given(texts=TEXTS, seed=st.integers(0, 2**32), limit=st.integers(1, 60))
def test_tokens_always_stand_for_exactly_their_text(texts: list[str], seed: int, limit: int) -> None:
    """With one token for each character, tokens are right if they spell the prefix that they stand for."""
    tree, draw = RadixTree(max_tokens=limit), random.Random(seed)
    for text in texts:
        base = tree.longest(text) if draw.random() < 0.7 else None
        start = 0 if base is None else base.num_chars
        ids = [ord(each) for each in text[start:]]
        if ids and draw.random() < 0.5:
            version = draw.randrange(4)
            tree.insert(text, ids, base=base, logprobs=[float(i) for i in ids], versions=[version] * len(ids))
        elif ids:
            tree.insert(text, ids, base=base)
        if draw.random() < 0.1:
            tree.remove_older(draw.randrange(4))
        for other in texts:
            found = tree.find(other)
            if found is not None:
                assert "".join(map(chr, found.token_ids)) == other[: found.num_chars]
        counted = {each for entry in list(tree._entries) for each in entry.chain()}
        assert tree.num_tokens == sum(len(each.token_ids) for each in tree._entries) <= limit
        assert counted == set(tree._entries), "an entry that another one extends is counted"


@pytest.mark.parametrize("number", [1000, 4000])
def test_memory_is_that_of_the_entries(number: int) -> None:
    tree = RadixTree(max_tokens=10**6)
    for i in range(number):
        tree.insert(f"session {i} of many", [i, i, i])
    assert (tree.num_entries, tree.num_tokens) == (number, 3 * number)
    tree.remove_older(10**6)
    nodes = [tree._root]
    for node in nodes:
        nodes += node.children.values()
    assert len(nodes) < 2.5 * number
