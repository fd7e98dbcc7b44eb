"""Messages between a run and the processes of its rewards: a length of four bytes, then as many bytes of content."""

import asyncio
import socket
import struct

_LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 2**30
"""A longer message means that something else wrote to the channel."""


def pack_frame(content: bytes) -> bytes:
    """The content with its length before it."""
    assert len(content) <= MAX_MESSAGE_BYTES, f"a message has at most {MAX_MESSAGE_BYTES} bytes, got {len(content)}"
    return _LENGTH.pack(len(content)) + content


def read_frame(channel: socket.socket) -> bytes | None:
    """Blocks until a whole message has arrived; None at the end of the channel."""
    head = _read_exactly(channel, _LENGTH.size)
    return None if head is None else _read_exactly(channel, _checked_length(head))


async def receive_frame(channel: socket.socket) -> bytes | None:
    """As `read_frame`, of a non-blocking socket."""
    head = await _receive_exactly(channel, _LENGTH.size)
    return None if head is None else await _receive_exactly(channel, _checked_length(head))


def _checked_length(head: bytes) -> int:
    length: int = _LENGTH.unpack(head)[0]
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message must have at most {MAX_MESSAGE_BYTES} bytes, got {length}")
    return length


def _read_exactly(channel: socket.socket, size: int) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        part = channel.recv(size - len(content))
        if not part:
            return None
        content += part
    return bytes(content)


async def _receive_exactly(channel: socket.socket, size: int) -> bytes | None:
    loop, content = asyncio.get_running_loop(), bytearray()
    while len(content) < size:
        part = await loop.sock_recv(channel, min(size - len(content), 2**20))
        if not part:
            return None
        content += part
    return bytes(content)
