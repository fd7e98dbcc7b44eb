"""A ring of blocks in memory that two processes of one machine share.

    trainer                                                  engine
      block i <- tensor          ══ shared memory ══>   digest compared, tensor <- block i
      digest of block i          ── socket ────────>
                                 <──────── socket ──    one byte: block i is free again

The ring fits in the processor's cache, so a transfer through it costs no memory bandwidth. The memory has no name: its
descriptor is sent over the socket, whose name is in Linux' abstract namespace. A killed process leaves nothing behind,
and only processes of the same user are admitted. Every tensor starts with a new block.

Memory ordering: a digest is sent after its block is written, and the byte after the block is read. The system calls of
the socket order both, so neither side needs atomics or fences.
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
    """The trainer's end, for any number of readers, each with its own socket."""

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
        """The name of each reader's socket."""
        return [listener.getsockname()[1:].decode() for listener in self._listeners]

    def accept(self, is_wanted: Callable[[], bool]) -> None:
        """Waits for the readers that have not connected yet.

        Args:
            is_wanted: called repeatedly; False means that a reader will not connect.

        Raises WeightSyncError when a reader does not connect in time or is no longer wanted.
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

        Raises WeightSyncError when a reader exits or reads nothing for the timeout.
        """
        digests = []
        for start in range(0, data.size, BLOCK_BYTES):
            piece = data[start : start + BLOCK_BYTES]
            self._await_free()
            # Block number n is at n modulo the size of the ring; the last block of a tensor may be shorter.
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
                raise _connection_error("an engine", e) from e

    def _await_free(self) -> None:
        # Every reader must have freed block n - NUM_BLOCKS before block n overwrites it. Each byte frees one block.
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

    Raises WeightSyncError when there is no such socket or it belongs to another user.
    """

    def __init__(self, name: str, *, timeout_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect("\0" + name)
            if _peer_uid(self._socket) != os.getuid():
                raise WeightSyncError(f"the socket {name!r} must belong to this user, got one of another user")
            geometry, fds, _, _ = socket.recv_fds(self._socket, _GEOMETRY.size, 1)
        except OSError as e:
            raise WeightSyncError(f"shared memory {name!r} could not be opened: {e}") from e
        if len(fds) != 1 or len(geometry) != _GEOMETRY.size:
            raise WeightSyncError(f"shared memory {name!r} must be sent with one file descriptor, got {len(fds)}")
        num_blocks, block_bytes = _GEOMETRY.unpack(geometry)
        self._blocks = _map(fds[0], num_blocks, block_bytes)
        os.close(fds[0])
        if block_bytes != BLOCK_BYTES:
            raise WeightSyncError(
                f"blocks must have {BLOCK_BYTES} bytes, got {block_bytes}; use the same version of rlscale for trainer "
                "and engine"
            )
        self._digests = b""
        self._num_read = 0
        self.is_broken = False

    def read(self, into: Bytes) -> tuple[list[bytes], list[bytes]]:
        """Fills `into` with the next bytes. Returns the digests of its blocks as computed here, and as sent.

        A block that differs is not written. Raises WeightSyncError when the trainer exits or sends nothing for the
        timeout.
        """
        found, sent = [], []
        size = self._blocks.shape[1]
        for start in range(0, into.size, size):
            target = into[start : start + size]
            # The digest arrives after its block is complete.
            sent.append(self._next_digest())
            block = self._blocks[self._num_read % len(self._blocks), : target.size]
            found.append(block_digest(block))
            if found[-1] == sent[-1]:
                target[:] = block
            self._num_read += 1
            try:
                self._socket.sendall(FREE)
            except OSError as e:
                raise _connection_error("the trainer", e) from e
        return found, sent

    def close(self) -> None:
        """Closes the socket. The trainer notices at its next block."""
        self.is_broken = True
        self._socket.close()

    def _next_digest(self) -> bytes:
        # A stream socket may return several digests at once, or part of one.
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


def _receive(source: socket.socket, max_bytes: int, peer: str) -> bytes:
    try:
        data = _poll(source, max_bytes) or source.recv(max_bytes)
    except OSError as e:
        raise _connection_error(peer, e) from e
    if not data:
        raise WeightSyncError(f"{peer} must keep the shared memory open until all weights have arrived, but closed it")
    return data


def _poll(source: socket.socket, max_bytes: int) -> bytes:
    """Returns the bytes that are there, or arrive within about a tenth of a millisecond; else none.

    The other side is rarely behind by more; to sleep and be woken for each block halves the rate.
    """
    for _ in range(NUM_POLLS):
        try:
            return source.recv(max_bytes, socket.MSG_DONTWAIT)
        except BlockingIOError:
            os.sched_yield()  # the other side may need this core
    return b""


def _connection_error(peer: str, error: OSError) -> WeightSyncError:
    cause = "no activity within the timeout" if isinstance(error, TimeoutError) else str(error)
    return WeightSyncError(f"{peer} must take part in the transfer through shared memory, got: {cause}")


def _peer_uid(end: socket.socket) -> int:
    raw = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
