"""Images in the messages of a request."""

from dataclasses import replace

from rlscale.gateway.apis.chat_request import ChatRequest, InvalidRequest
from rlscale.gateway.codec import Codec
from rlscale.images import Image, image_digests


def open_images(request: ChatRequest, codec: Codec) -> tuple[ChatRequest, tuple[Image, ...]]:
    """A request with hashes in place of data URLs, and its images in the order of their places.

    Raises:
        InvalidRequest: an image cannot be read, or this server reads none.
    """
    if not image_digests(request.messages):
        return request, ()
    if codec.images is None:
        raise InvalidRequest(
            "messages must be texts, got an image; the model reads none, or the run has no data.multimodal_keys",
            param="messages",
        )
    try:
        messages, images = codec.images.open(request.messages)
    except ValueError as error:
        raise InvalidRequest(f"messages must have images that can be read; {error}", param="messages") from error
    return replace(request, messages=tuple(messages)), tuple(images)
