"""Messages between a sandbox and the run: a JSON header and bytes. Standard library only, like the other end."""

import json
import socket
import struct
from typing import Any

_SIZES = struct.Struct("<IQ")
SIZES_BYTES = _SIZES.size


def pack_sandbox_frame(header: dict[str, Any], payload: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return _SIZES.pack(len(encoded), len(payload)) + encoded + payload


def unpack_sizes(content: bytes) -> tuple[int, int]:
    """Lengths of header and payload."""
    header, payload = _SIZES.unpack(content)
    return header, payload


def receive_sandbox_frame(connection: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None: the other end has closed."""
    sizes = _receive(connection, SIZES_BYTES)
    if sizes is None:
        return None
    num_header, num_payload = unpack_sizes(sizes)
    header, payload = _receive(connection, num_header), _receive(connection, num_payload)
    if header is None or payload is None:
        return None
    decoded: dict[str, Any] = json.loads(header)
    return decoded, payload


def _receive(connection: socket.socket, num_bytes: int) -> bytes | None:
    content = bytearray(num_bytes)
    view, received = memoryview(content), 0
    while received < num_bytes:
        count = connection.recv_into(view[received:])
        if not count:
            return None
        received += count
    return bytes(content)
