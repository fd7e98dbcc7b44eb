"""A ring of blocks in memory that two processes of one machine share: the bytes of weights go through it.

    trainer                                                  engine
      block i <- tensor          ══ shared memory ══>   digest compared, tensor <- block i
      digest of block i          ── socket ────────>
                                 <──────── socket ──    one byte: block i is free again

The ring is small enough for the processor's cache, so that the way through it costs no memory bandwidth. The memory has
no name: its descriptor goes over the socket, whose name is in Linux' abstract namespace. Nothing is left behind by a
killed process, and only processes of the same user are let in. A tensor begins a new block.
"""

import mmap
import os
import socket
import struct
import uuid
from collections.abc import Callable

import numpy as np

from rlscale.algo.checksum import BLOCK_BYTES, DIGEST_BYTES, Bytes, block_digest
from rlscale.errors import WeightSyncError

NUM_BLOCKS = 16
NUM_POLLS = 100
FREE = b"."
_GEOMETRY = struct.Struct("<II")  # blocks, bytes of a block
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_POLL_S = 0.02


class RingWriter:
    """The trainer's end, for any number of readers, each at a socket of its own."""

    def __init__(self, num_readers: int, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._listeners = [_listen() for _ in range(num_readers)]
        self._readers: list[socket.socket | None] = [None] * num_readers
        self._num_freed = [0] * num_readers
        self._num_written = 0
        self._fd = os.memfd_create("rlscale-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, NUM_BLOCKS * BLOCK_BYTES)
        self._blocks = _map(self._fd, NUM_BLOCKS, BLOCK_BYTES)

    @property
    def names(self) -> list[str]:
        """Where each reader finds its socket."""
        return [listener.getsockname()[1:].decode() for listener in self._listeners]

    def accept(self, is_wanted: Callable[[], bool]) -> None:
        """Waits for the readers that have not come yet.

        Args:
            is_wanted: asked again and again; False means that a reader will not come.

        Raises WeightSyncError when a reader does not come in time or is no longer wanted.
        """
        for i, listener in enumerate(self._listeners):
            waited = 0.0
            listener.settimeout(_POLL_S)
            while self._readers[i] is None:
                try:
                    self._readers[i] = self._admit(listener.accept()[0])
                except TimeoutError:
                    waited += _POLL_S
                    if waited > self._timeout_s or not is_wanted():
                        raise WeightSyncError(
                            f"an engine must open its shared memory within {self._timeout_s:g} s, got no connection"
                        ) from None

    def write(self, data: Bytes) -> list[bytes]:
        """Sends bytes to all readers and returns the digests of their blocks.

        Raises WeightSyncError when a reader ends or takes nothing for the timeout.
        """
        digests = []
        for start in range(0, data.size, BLOCK_BYTES):
            piece = data[start : start + BLOCK_BYTES]
            self._await_free()
            block = self._blocks[self._num_written % NUM_BLOCKS, : piece.size]
            block[:] = piece
            digests.append(self._digest(block))  # still in cache
            self._announce(digests[-1])
            self._num_written += 1
        return digests

    def close(self) -> None:
        for end in (*self._listeners, *self._readers):
            if end is not None:
                end.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _digest(self, block: Bytes) -> bytes:
        return block_digest(block)

    def _announce(self, digest: bytes) -> None:
        for reader in self._readers:
            assert reader is not None, "accept comes before write"
            try:
                reader.sendall(digest)
            except OSError as e:
                raise _lost("an engine", e) from e

    def _await_free(self) -> None:
        for i, reader in enumerate(self._readers):
            assert reader is not None, "accept comes before write"
            while self._num_written - self._num_freed[i] >= NUM_BLOCKS:
                self._num_freed[i] += len(_receive(reader, 4096, "an engine"))

    def _admit(self, reader: socket.socket) -> socket.socket | None:
        if _peer_uid(reader) != os.getuid():
            reader.close()
            return None
        reader.settimeout(self._timeout_s)
        socket.send_fds(reader, [_GEOMETRY.pack(NUM_BLOCKS, BLOCK_BYTES)], [self._fd])
        return reader


class RingReader:
    """The engine's end.

    Raises WeightSyncError when there is no such socket or it is another user's.
    """

    def __init__(self, name: str, *, timeout_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect("\0" + name)
            if _peer_uid(self._socket) != os.getuid():
                raise WeightSyncError(f"the socket {name!r} must be of this user, got another's")
            geometry, fds, _, _ = socket.recv_fds(self._socket, _GEOMETRY.size, 1)
        except OSError as e:
            raise WeightSyncError(f"shared memory {name!r} could not be opened: {e}") from e
        if len(fds) != 1 or len(geometry) != _GEOMETRY.size:
            raise WeightSyncError(f"shared memory {name!r} must come with its descriptor, got {len(fds)} of them")
        count, size = _GEOMETRY.unpack(geometry)
        self._blocks = _map(fds[0], count, size)
        os.close(fds[0])
        if size != BLOCK_BYTES:
            raise WeightSyncError(f"blocks must be of {BLOCK_BYTES} bytes, got {size}; is the trainer of this version?")
        self._digests = b""
        self._num_read = 0
        self.is_broken = False

    def read(self, into: Bytes) -> tuple[list[bytes], list[bytes]]:
        """Fills `into` with the next bytes. Returns the digests of its blocks as found here, and as sent.

        What differs is not written. Raises WeightSyncError when the trainer ends or sends nothing for the timeout.
        """
        found, sent = [], []
        size = self._blocks.shape[1]
        for start in range(0, into.size, size):
            target = into[start : start + size]
            sent.append(self._next_digest())
            block = self._blocks[self._num_read % len(self._blocks), : target.size]
            found.append(block_digest(block))
            if found[-1] == sent[-1]:
                target[:] = block
            self._num_read += 1
            try:
                self._socket.sendall(FREE)
            except OSError as e:
                raise _lost("the trainer", e) from e
        return found, sent

    def close(self) -> None:
        """The trainer notices at its next block."""
        self.is_broken = True
        self._socket.close()

    def _next_digest(self) -> bytes:
        while len(self._digests) < DIGEST_BYTES:
            self._digests += _receive(self._socket, DIGEST_BYTES * NUM_BLOCKS, "the trainer")
        digest, self._digests = self._digests[:DIGEST_BYTES], self._digests[DIGEST_BYTES:]
        return digest


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0rlscale-{uuid.uuid4().hex}")
    listener.listen(1)
    return listener


def _map(fd: int, num_blocks: int, block_bytes: int) -> Bytes:
    memory = mmap.mmap(fd, num_blocks * block_bytes)
    blocks: Bytes = np.frombuffer(memory, dtype=np.uint8).reshape(num_blocks, block_bytes)
    return blocks


def _receive(source: socket.socket, most: int, who: str) -> bytes:
    try:
        data = _poll(source, most) or source.recv(most)
    except OSError as e:
        raise _lost(who, e) from e
    if not data:
        raise WeightSyncError(f"{who} must stay until all weights are there, but has closed the shared memory")
    return data


def _poll(source: socket.socket, most: int) -> bytes:
    """What is there, or comes within about a tenth of a millisecond.

    The other side is hardly ever behind by more; to sleep and be woken for each block halves the rate.
    """
    for _ in range(NUM_POLLS):
        try:
            return source.recv(most, socket.MSG_DONTWAIT)
        except BlockingIOError:
            os.sched_yield()  # the other side may want this very core
    return b""


def _lost(who: str, error: OSError) -> WeightSyncError:
    what = "did nothing for too long" if isinstance(error, TimeoutError) else str(error)
    return WeightSyncError(f"{who} must take part in the transfer through shared memory, got: {what}")


def _peer_uid(end: socket.socket) -> int:
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
