"""Radix tree from text to the tokens that an engine read or generated for it.

    ""
    └── "<user>1+1=<assistant>"         end of a prompt: its tokens
        ├── "2"
        │   ├── "<eos>"                 end of an answer: its tokens, logprobs and weight versions
        │   └── "<eos><user>2+2=..."    end of the next prompt: the tokens since the answer
        └── "3<eos>"

Edges are compressed: a node has one child per first character, and an edge is split where two texts part. Tokens are
not split. An entry has the tokens since the entry that it extends, which may be several nodes above.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

PROMPT_VERSION = -1
"""Weight version of a token that no engine generated."""


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """The tokens of a text. Prompt tokens have loss mask 0, logprob 0 and version `PROMPT_VERSION`."""

    token_ids: list[int]
    logprobs: list[float]
    loss_mask: list[int]
    weight_versions: list[int]
    num_chars: int  # length of the text that they stand for


@dataclass(slots=True, eq=False)
class Entry:
    """Tokens that end at a node, without those of the entry `base` that they extend."""

    node: _Node
    base: Entry | None
    token_ids: array[int]
    logprobs: array[float] | None  # None: a prompt
    versions: array[int] | None
    num_chars: int  # of the whole text
    oldest: int | None  # oldest weight version of the whole text; None: a prompt
    num_extensions: int = 0  # entries in the tree that extend it

    def chain(self) -> Iterator[Entry]:
        """The entry, and those that it extends."""
        entry: Entry | None = self
        while entry is not None:
            yield entry
            entry = entry.base


@dataclass(slots=True, eq=False)
class _Node:
    edge: str = ""  # text since the parent
    parent: _Node | None = None
    children: dict[str, _Node] = field(default_factory=dict)  # by first character
    entry: Entry | None = None


class RadixTree:
    """Cache of tokens by text prefix. Used from one thread.

    Invariants: the tokens of an entry are those of its base, then its own, and stand for exactly the text of its node.
    An entry was used at least as recently as those that extend it. `num_tokens` is at most `max_tokens` after `insert`:
    the entries that were not used for longest are removed, answers before the prompts that they extend.

    Args:
        max_tokens: of all entries together.

    Example:
        tree = RadixTree(max_tokens=1_000_000)
        prompt = tree.insert("1+1=", [5, 6, 5, 7])
        tree.insert("1+1=2", [8], base=prompt, logprobs=[-0.1], versions=[3])
        tree.find("1+1=2, and").token_ids  # [5, 6, 5, 7, 8], for the first 5 characters
    """

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._root = _Node()
        self._entries: OrderedDict[Entry, None] = OrderedDict()  # those used last at the end
        self.num_tokens = self.num_clears = 0

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def longest(self, text: str, *, oldest: int = 0) -> Entry | None:
        """The entry of the longest prefix of a text whose generated tokens all have version `oldest` or newer."""
        found, node, position = None, self._root, 0
        while True:
            if node.entry is not None and (node.entry.oldest is None or node.entry.oldest >= oldest):
                found = node.entry
            child = node.children.get(text[position : position + 1])
            if child is None or not text.startswith(child.edge, position):
                break
            position += len(child.edge)
            node = child
        if found is not None:
            self._touch(found)
        return found

    def find(self, text: str, *, oldest: int = 0) -> CachedTokens | None:
        """The tokens of the longest cached prefix; None: no prefix is cached."""
        entry = self.longest(text, oldest=oldest)
        return None if entry is None else collect_tokens(entry)

    def insert(
        self,
        text: str,
        token_ids: Sequence[int],
        *,
        base: Entry | None = None,
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
    ) -> Entry:
        """Adds the tokens of a text, and returns their entry. It replaces an entry of the same text.

        Args:
            text: the whole text, which begins with that of `base`.
            token_ids: the tokens after those of `base`.
            base: the entry that they extend; None: they stand for the whole text.
            logprobs: of generated tokens, one each; None: a prompt.
            versions: weight versions of generated tokens, one each.
        """
        entry = Entry(
            node=self._node_of(text),
            base=base,
            token_ids=array("q", token_ids),
            logprobs=None if logprobs is None else array("d", logprobs),
            versions=None if versions is None else array("q", versions),
            num_chars=len(text),
            oldest=_oldest(base, versions),
        )
        assert entry.logprobs is None or len(entry.logprobs) == len(entry.token_ids), "one logprob for each token"
        assert entry.versions is None or len(entry.versions) == len(entry.token_ids), "one version for each token"
        known = entry.node.entry
        # A prompt that repeats an answer of the engine must not replace it: it has no logprobs.
        if known is not None and entry.logprobs is None and _same_tokens(known, entry):
            self._touch(known)
            return known
        entry.node.entry = entry
        self._touch(entry)
        if known is not None:
            self._remove_if_unused(known)
        self._shrink()
        return entry

    def remove_older(self, oldest: int) -> None:
        """Removes the entries with a token of a weight version before `oldest`. Prompts stay."""
        for entry in [each for each in self._entries if each.oldest is not None and each.oldest < oldest]:
            if entry in self._entries:
                self._remove(entry)

    def clear(self) -> None:
        """Removes all entries."""
        self._root = _Node()
        self._entries.clear()
        self.num_tokens = 0
        self.num_clears += 1

    def _touch(self, entry: Entry) -> None:
        """Marks an entry as used, then those that it extends, so that it is removed before them."""
        for each in entry.chain():
            # One that was removed or replaced, and is extended again, counts again.
            if each not in self._entries:
                self.num_tokens += len(each.token_ids)
                self._entries[each] = None
                if each.base is not None:
                    each.base.num_extensions += 1
            self._entries.move_to_end(each)

    def _shrink(self) -> None:
        while self.num_tokens > self._max_tokens and self._entries:
            self._remove(next(iter(self._entries)))

    def _remove_if_unused(self, entry: Entry) -> None:
        """Removes an entry that another one of the same text has replaced, unless others extend it."""
        if entry in self._entries and entry.node.entry is not entry and not entry.num_extensions:
            self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry]
        self.num_tokens -= len(entry.token_ids)
        if entry.base is not None:
            entry.base.num_extensions -= 1
            self._remove_if_unused(entry.base)
        node = entry.node
        if node.entry is not entry:
            return
        node.entry = None
        while node.parent is not None and node.entry is None and not node.children:
            del node.parent.children[node.edge[0]]
            node = node.parent
        if node.parent is not None and node.entry is None and len(node.children) == 1:
            _merge_into_child(node)

    def _node_of(self, text: str) -> _Node:
        """The node of a text, which may be new."""
        assert text, "the empty text has no tokens"
        node, position = self._root, 0
        while position < len(text):
            child = node.children.get(text[position])
            if child is None:
                child = _Node(edge=text[position:], parent=node)
                node.children[text[position]] = child
                return child
            common = _common_length(child.edge, text, position)
            if common < len(child.edge):
                child = _split(child, common)
            node, position = child, position + common
        return node


def collect_tokens(entry: Entry) -> CachedTokens:
    """All tokens of an entry, from the start of its text."""
    result = CachedTokens([], [], [], [], entry.num_chars)
    for each in list(entry.chain())[::-1]:
        number = len(each.token_ids)
        result.token_ids.extend(each.token_ids)
        result.logprobs.extend([0.0] * number if each.logprobs is None else each.logprobs)
        result.loss_mask.extend([int(each.logprobs is not None)] * number)
        result.weight_versions.extend([PROMPT_VERSION] * number if each.versions is None else each.versions)
    return result


def _oldest(base: Entry | None, versions: Sequence[int] | None) -> int | None:
    known = [] if base is None or base.oldest is None else [base.oldest]
    return min([*known, *(versions or [])], default=None)


def _same_tokens(one: Entry, other: Entry) -> bool:
    return collect_tokens(one).token_ids == collect_tokens(other).token_ids


def _common_length(edge: str, text: str, position: int) -> int:
    """Number of characters that an edge and a text from `position` have in common."""
    if text.startswith(edge, position):
        return len(edge)
    # The longest common prefix lies between two lengths, whose middle is compared as a whole: faster than a loop.
    low, high = 0, min(len(edge), len(text) - position)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(edge[:middle], position):
            low = middle
        else:
            high = middle - 1
    return low


def _split(node: _Node, length: int) -> _Node:
    """Cuts the edge of a node after `length` characters, and returns the new upper node."""
    assert node.parent is not None and 0 < length < len(node.edge), "an edge is cut inside"
    upper = _Node(edge=node.edge[:length], parent=node.parent)
    node.parent.children[node.edge[0]] = upper
    node.edge, node.parent = node.edge[length:], upper
    upper.children[node.edge[0]] = node
    return upper


def _merge_into_child(node: _Node) -> None:
    """Joins a node without an entry with its only child."""
    assert node.parent is not None, "the root stays"
    (child,) = node.children.values()
    child.edge, child.parent = node.edge + child.edge, node.parent
    node.parent.children[child.edge[0]] = child
