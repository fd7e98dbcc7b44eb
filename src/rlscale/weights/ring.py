"""The way of weights from the memory of one process into that of another on the same machine.

    trainer                                                  engine
      chunk digested             ── socket: where, digests ─>  reads the trainer's memory, compares, writes

or, where the system does not let one process read another:

      block i <- tensor          ══ shared memory ══════════>  digest compared, tensor <- block i
      digest of block i          ── socket ────────────────>
                                 <──────────────── socket ──   one byte: block i is free again

The ring of blocks is small enough for the processor's cache. Its memory has no name: the descriptor goes over the
socket, whose name is in Linux' abstract namespace. Nothing is left behind by a killed process, and only processes of
the same user are let in. A tensor begins a new block.
"""

import mmap
import os
import socket
import struct
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rlscale.errors import WeightSyncError
from rlscale.weights.checksum import BLOCK_BYTES, Bytes, block_digest
from rlscale.weights.process_memory import address_of, allow_reading, read_memory

NUM_BLOCKS = 16
NUM_POLLS = 100
DIGEST_BYTES = 8
FREE = b"."
CHUNK_BLOCKS = 16  # of a chunk that is announced at once
MAX_READ_THREADS = 4
DIRECT, BY_RING = b"d", b"r"
_WELCOME = struct.Struct("<IIQ8s")  # blocks, bytes of a block, address of the cookie, cookie
_CHUNK = struct.Struct("<Q")  # address
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_POLL_S = 0.02


class RingWriter:
    """The trainer's end, for any number of readers, each at a socket of its own.

    Args:
        num_readers: that will come.
        timeout_s: of every wait for a reader.
        direct: whether readers may read this process's memory, where the system lets them.
    """

    def __init__(self, num_readers: int, *, timeout_s: float, direct: bool = True) -> None:
        self._timeout_s, self.is_direct = timeout_s, direct
        self._listeners = [_listen() for _ in range(num_readers)]
        self._readers: list[socket.socket | None] = [None] * num_readers
        self._num_freed = [0] * num_readers
        self._num_written = 0
        self._is_open = False
        self._fd = os.memfd_create("rlscale-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, NUM_BLOCKS * BLOCK_BYTES)
        self._blocks = _map(self._fd, NUM_BLOCKS, BLOCK_BYTES)
        self._cookie: Bytes = np.frombuffer(os.urandom(8), dtype=np.uint8)

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
        if not self._is_open:
            self._agree()

    def write(self, data: Bytes) -> list[bytes]:
        """Sends bytes to all readers and returns the digests of their blocks.

        Directly read bytes must stay as they are until the readers have said that they have them. Raises
        WeightSyncError when a reader ends or takes nothing for the timeout.
        """
        return self._write_direct(data) if self.is_direct else self._write_blocks(data)

    def _write_direct(self, data: Bytes) -> list[bytes]:
        digests: list[bytes] = []
        for start in range(0, data.size, CHUNK_BLOCKS * BLOCK_BYTES):
            chunk = data[start : start + CHUNK_BLOCKS * BLOCK_BYTES]
            found = [self._digest(chunk[i : i + BLOCK_BYTES]) for i in range(0, chunk.size, BLOCK_BYTES)]
            self._tell(_CHUNK.pack(address_of(chunk)) + b"".join(found))
            digests += found
        return digests

    def _write_blocks(self, data: Bytes) -> list[bytes]:
        digests = []
        for start in range(0, data.size, BLOCK_BYTES):
            piece = data[start : start + BLOCK_BYTES]
            self._await_free()
            block = self._blocks[self._num_written % NUM_BLOCKS, : piece.size]
            block[:] = piece
            digests.append(self._digest(block))  # still in cache
            self._tell(digests[-1])
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

    def _agree(self) -> None:
        """Every reader says whether it can read directly, and is told whether all can."""
        answers = [_receive(reader, 1, "an engine") for reader in self._readers if reader is not None]
        self.is_direct = self.is_direct and all(answer == DIRECT for answer in answers)
        self._tell(DIRECT if self.is_direct else BY_RING)
        self._is_open = True

    def _tell(self, message: bytes) -> None:
        for reader in self._readers:
            assert reader is not None, "accept comes before write"
            try:
                reader.sendall(message)
            except OSError as e:
                raise _lost("an engine", e) from e

    def _await_free(self) -> None:
        for i, reader in enumerate(self._readers):
            assert reader is not None, "accept comes before write"
            while self._num_written - self._num_freed[i] >= NUM_BLOCKS:
                self._num_freed[i] += len(_receive(reader, 4096, "an engine"))

    def _admit(self, reader: socket.socket) -> socket.socket | None:
        pid, uid = _peer(reader)
        if uid != os.getuid():
            reader.close()
            return None
        if self.is_direct:
            allow_reading(pid)
        reader.settimeout(self._timeout_s)
        welcome = _WELCOME.pack(NUM_BLOCKS, BLOCK_BYTES, address_of(self._cookie), self._cookie.tobytes())
        socket.send_fds(reader, [welcome], [self._fd])
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
            self._pid, uid = _peer(self._socket)
            if uid != os.getuid():
                raise WeightSyncError(f"the socket {name!r} must be of this user, got another's")
            welcome, fds, _, _ = socket.recv_fds(self._socket, _WELCOME.size, 1)
        except OSError as e:
            raise WeightSyncError(f"shared memory {name!r} could not be opened: {e}") from e
        if len(fds) != 1 or len(welcome) != _WELCOME.size:
            raise WeightSyncError(f"shared memory {name!r} must come with its descriptor, got {len(fds)} of them")
        count, size, address, cookie = _WELCOME.unpack(welcome)
        self._blocks = _map(fds[0], count, size)
        os.close(fds[0])
        if size != BLOCK_BYTES:
            raise WeightSyncError(f"blocks must be of {BLOCK_BYTES} bytes, got {size}; is the trainer of this version?")
        self._received = b""
        self._num_read = 0
        self.is_broken = False
        self._send(DIRECT if self._finds(cookie, address) else BY_RING)
        self.is_direct = self._take(1) == DIRECT
        self._pool = ThreadPoolExecutor(min(MAX_READ_THREADS, os.cpu_count() or 1)) if self.is_direct else None

    def read(self, into: Bytes) -> "Future[tuple[list[bytes], list[bytes]]]":
        """Fills `into` with the next bytes; the digests of its blocks as found here, and as sent.

        What differs is not to be used. Raises WeightSyncError, now or as the result, when the trainer ends or sends
        nothing for the timeout.
        """
        if self._pool is not None:
            return self._read_direct(self._pool, into)
        future: Future[tuple[list[bytes], list[bytes]]] = Future()
        future.set_result(self._read_blocks(into))
        return future

    def close(self) -> None:
        """The trainer notices at its next block."""
        self.is_broken = True
        self._socket.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _read_direct(self, pool: ThreadPoolExecutor, into: Bytes) -> "Future[tuple[list[bytes], list[bytes]]]":
        sent: list[bytes] = []
        copies: list[Future[list[bytes]]] = []
        for start in range(0, into.size, CHUNK_BLOCKS * BLOCK_BYTES):
            chunk = into[start : start + CHUNK_BLOCKS * BLOCK_BYTES]
            (address,) = _CHUNK.unpack(self._take(_CHUNK.size))
            count = -(-chunk.size // BLOCK_BYTES)
            digests = self._take(count * DIGEST_BYTES)
            sent += [digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] for i in range(count)]
            copies.append(pool.submit(self._copy, address, chunk))
        # Counted among the copies, so that it is done after them in a pool of any size: it only waits for earlier ones.
        return pool.submit(lambda: ([digest for copy in copies for digest in copy.result()], sent))

    def _copy(self, address: int, chunk: Bytes) -> list[bytes]:
        found = []
        for start in range(0, chunk.size, BLOCK_BYTES):
            block = chunk[start : start + BLOCK_BYTES]
            try:
                read_memory(self._pid, address + start, block)
            except OSError as e:
                raise _lost("the trainer", e) from e
            found.append(block_digest(block))  # still in cache
        return found

    def _read_blocks(self, into: Bytes) -> tuple[list[bytes], list[bytes]]:
        found, sent = [], []
        for start in range(0, into.size, BLOCK_BYTES):
            target = into[start : start + BLOCK_BYTES]
            sent.append(self._take(DIGEST_BYTES))
            block = self._blocks[self._num_read % len(self._blocks), : target.size]
            found.append(block_digest(block))
            if found[-1] == sent[-1]:
                target[:] = block
            self._num_read += 1
            self._send(FREE)
        return found, sent

    def _finds(self, cookie: bytes, address: int) -> bool:
        """Whether the trainer's memory can be read, and is the trainer's."""
        seen: Bytes = np.zeros(len(cookie), dtype=np.uint8)
        try:
            read_memory(self._pid, address, seen)
        except OSError:
            return False
        return seen.tobytes() == cookie

    def _take(self, num_bytes: int) -> bytes:
        while len(self._received) < num_bytes:
            self._received += _receive(self._socket, max(num_bytes, DIGEST_BYTES * NUM_BLOCKS), "the trainer")
        taken, self._received = self._received[:num_bytes], self._received[num_bytes:]
        return taken

    def _send(self, message: bytes) -> None:
        try:
            self._socket.sendall(message)
        except OSError as e:
            raise _lost("the trainer", e) from e


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


def _peer(end: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid), int(uid)
