"""The conversations of one trajectory as a tree of turns, grown request by request.

    request (messages, tools) ── prepare ──> PreparedRequest (ids) ── engine ──> Generation ── add ──> answer
                                    │
       longest history that the messages continue ── bridge ──> the same path, longer
                                    └─ no bridge, or other messages ──> a new path with its own prompt

A request is in the tree once it is answered; until then nothing of it is. So requests may be concurrent, and one that
fails leaves no trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlscale.images import Image
from rlscale.renderers.message_history import HistoryNode, MessageHistory, message_key, message_text
from rlscale.renderers.message_images import MessageImages
from rlscale.renderers.renderer import Message, ParsedAnswer, Renderer, ToolSpec
from rlscale.trajectory import CONVERSATIONS, FORKS, Trajectory
from rlscale.types import Generation

__all__ = ["CONVERSATIONS", "FORKS", "ConversationTree", "PreparedRequest", "message_key", "message_text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRequest:
    """A request of a conversation, rendered."""

    token_ids: list[int]
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    parent: int | None  # turn that the request continues; None: it has its own prompt
    num_known: int  # ids of `token_ids` that are on the path to `parent`; 0 with its own prompt
    num_known_messages: int = 0  # messages that are on that path
    is_fork: bool  # the messages continue a path, and no bridge could extend its ids
    keys: tuple[str, ...] = ()  # of `messages`, by `message_key`; empty: not computed yet
    images: tuple[Image, ...] = ()  # of the ids after the first `num_known`


class ConversationTree:
    """Grows a trajectory by requests of one or several conversations. Used from one thread at a time.

    Invariant: a turn's ids are those that the engine got or sampled, and each of them is in the trajectory once.

    Args:
        images: of the messages. None: they are texts.

    Example:
        tree = ConversationTree(trajectory, renderer)
        request = tree.prepare(messages, tools)
        answer = tree.add(request, await session.generate(request.token_ids))
        messages.append(answer.to_message())
    """

    def __init__(self, trajectory: Trajectory, renderer: Renderer, *, images: MessageImages | None = None) -> None:
        self.trajectory, self._renderer, self._images = trajectory, renderer, images
        self._history = MessageHistory()
        self._ends: dict[int, HistoryNode] = {}  # histories by the turn of their answer
        # Turns of given tokens by the turn before them, their ids and images; prompts of new paths likewise.
        self._given: dict[tuple[int | None, bytes, tuple[str, ...]], int | None] = {}
        trajectory.metadata.setdefault(FORKS, 0)
        trajectory.metadata.setdefault(CONVERSATIONS, 0)

    def prepare(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> PreparedRequest:
        """The ids of a request. Does not change the tree.

        Raises:
            RenderError: the template cannot render these messages.
            SampledPlaceholderError: the policy wrote placeholders, and the request has images.
        """
        # All messages are compared, but only new ones are hashed and encoded.
        keys, histories = self._history.walk(messages, tools)
        size, node = _longest_answered(histories, len(messages))
        if node is not None and node.turn is not None:
            known = self.trajectory.token_ids(node.turn) if node.ids is None else node.ids
            ids = self._renderer.bridge(known, self._to_template(messages[size:]), tools=tools)
            if ids is not None:
                assert ids[: len(known)] == known, "a bridge must keep the ids of the path"
                ids, images = self._place_images(ids, messages[size:], node.turn, num_known=len(known))
                return PreparedRequest(
                    token_ids=ids,
                    images=images,
                    messages=tuple(messages),
                    tools=tuple(tools),
                    parent=node.turn,
                    num_known=len(known),
                    num_known_messages=size,
                    is_fork=False,
                    keys=keys,
                )
        ids = self._renderer.render(self._to_template(messages), tools=tools)
        ids, images = self._place_images(ids, messages, None, num_known=0)
        return PreparedRequest(
            token_ids=ids,
            images=images,
            messages=tuple(messages),
            tools=tuple(tools),
            parent=None,
            num_known=0,
            is_fork=node is not None,
            keys=keys,
        )

    def images_of(self, request: PreparedRequest) -> tuple[Image, ...]:
        """All images of a request, in the order of their placeholders."""
        return (*self._images_before(request.parent), *request.images)

    def add(
        self,
        request: PreparedRequest,
        generation: Generation,
        *,
        shown: Callable[[ParsedAnswer], ParsedAnswer] | None = None,
    ) -> ParsedAnswer:
        """Adds an answered request; returns its answer as a message. Each of `n` answers is a branch.

        Args:
            shown: changes the answer to what the client gets, e.g. without a stop string: its next request has that.
                None: the answer as parsed.
        """
        given = self._add_given(request)
        turn = self.trajectory.add_generation(generation, parent=given)
        return self._add_answer(request, turn, generation.output_ids, shown)

    def add_remainder(self, request: PreparedRequest, generation: Generation) -> ParsedAnswer:
        """Adds the rest of an answer that `reopen` returned; returns the whole answer."""
        turn = self.trajectory.add_generation(generation)
        return self._add_answer(request, turn, self.trajectory.turns[turn].token_ids.tolist(), None)

    def reopen(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> tuple[list[Message], PreparedRequest | None]:
        """Takes over the turns of an aborted trajectory, which are one path and have their messages.

        A last turn without tokens is removed, with the messages before it: they are given again.

        Args:
            messages: before the first turn.

        Returns:
            The messages of the next request, and the request whose answer is the last turn; None: it is complete.
        """
        turns, history = self.trajectory.turns, list(messages)
        finished = turns[:-1]
        for number, turn in enumerate(finished):
            history += turn.messages
            if turn.sampled:
                node = self._history.add(list(map(message_key, history)), history, tools)
                node.turn, self._ends[number] = number, node
        if len(turns[-1].token_ids):
            parent = turns[-1].parent
            request = PreparedRequest(
                token_ids=self.trajectory.token_ids(parent),
                messages=tuple(history),
                tools=tuple(tools),
                parent=parent,
                num_known=0,
                is_fork=False,
            )
            return history, request
        while turns and not (turns[-1].sampled and len(turns[-1].token_ids)):
            self._remove_last()
        return history, None

    def _to_template(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages if self._images is None else self._images.to_template(messages)

    def _place_images(
        self, token_ids: list[int], messages: Sequence[Message], parent: int | None, *, num_known: int
    ) -> tuple[list[int], tuple[Image, ...]]:
        """Ids with a placeholder for each feature of the images in new messages, and these images."""
        if self._images is None:
            return token_ids, ()
        images = self._images.find(messages)
        ids = self._images.expand(token_ids, images, num_known=num_known)
        self._images.check_count(ids, (*self._images_before(parent), *images))
        return ids, images

    def _images_before(self, parent: int | None) -> tuple[Image, ...]:
        """Images of the path up to and with a turn; none where a request has its own prompt."""
        return () if parent is None else self.trajectory.images(parent)

    def _remove_last(self) -> None:
        trajectory = self.trajectory
        last = trajectory.turns.pop()
        if trajectory.turns and last.routes is not None:
            trajectory.turns[-1].routes = last.routes[: len(trajectory.token_ids())]
        if not trajectory.turns:
            # No request has been answered: the first one begins the conversation.
            trajectory.metadata |= {FORKS: 0, CONVERSATIONS: 0}

    def _add_answer(
        self,
        request: PreparedRequest,
        turn: int,
        output_ids: Sequence[int],
        shown: Callable[[ParsedAnswer], ParsedAnswer] | None,
    ) -> ParsedAnswer:
        """Parses a complete turn, and adds its history."""
        answer = self._renderer.parse(output_ids, prompt_ids=request.token_ids, tools=request.tools)
        answer = answer if shown is None else shown(answer)
        message = answer.to_message()
        self.trajectory.turns[turn].messages = (message,)
        keys = request.keys or tuple(map(message_key, request.messages))
        node = self._history.add([*keys, message_key(message)], [*request.messages, message], request.tools)
        node.turn, node.ids = turn, [*request.token_ids, *output_ids]
        self._ends[turn] = node
        # A copy of the ids for each turn would grow quadratically.
        before = self._ends.get(-1 if request.parent is None else request.parent)
        if before is not None and before.turn == request.parent:
            before.ids = None
        return answer

    def _add_given(self, request: PreparedRequest) -> int | None:
        """Adds the given tokens of a request; returns the turn that its answer follows."""
        new = request.token_ids[request.num_known :]
        if request.parent is not None and not new:
            return request.parent
        # Pictures of one size have equal ids.
        key = (request.parent, np.asarray(new, np.int32).tobytes(), _digests(request.images))
        # Answers of equal requests are branches after one turn.
        if key not in self._given:
            if request.parent is None:
                number = self._add_prompt(request)
            else:
                number = self.trajectory.extend(new, parent=request.parent)
                self.trajectory.turns[number].images = request.images
            if number is not None:
                self.trajectory.turns[number].messages = request.messages[request.num_known_messages :]
            self._given[key] = number
        return self._given[key]

    def _add_prompt(self, request: PreparedRequest) -> int | None:
        """Begins a conversation with its own prompt; that of the trajectory needs no turn."""
        trajectory = self.trajectory
        trajectory.metadata[CONVERSATIONS] += 1
        trajectory.metadata[FORKS] += request.is_fork
        prompt = trajectory.prompt
        images = prompt.images if self._images is None else request.images
        if tuple(request.token_ids) == prompt.token_ids and _digests(images) == _digests(prompt.images):
            return None
        # An empty turn carries the prompt of this conversation.
        number = trajectory.extend([], parent=None)
        trajectory.turns[number].prompt = replace(prompt, token_ids=tuple(request.token_ids), text="", images=images)
        return number


def _digests(images: Sequence[Image]) -> tuple[str, ...]:
    return tuple(image.digest for image in images)


def _longest_answered(histories: Sequence[HistoryNode], num_messages: int) -> tuple[int, HistoryNode | None]:
    """The longest answered history that a request of so many messages continues, and its size."""
    for size in range(min(len(histories), num_messages - 1), 0, -1):
        if histories[size - 1].turn is not None:
            return size, histories[size - 1]
    return 0, None
