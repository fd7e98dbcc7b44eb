"""System calls of Linux that Python 3.11 does not have: namespaces, mounts, capabilities, seccomp.

Standard library only: the first process of a sandbox imports it without the installed packages.
"""

import ctypes
import fcntl
import os
import platform
import socket
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1024, 2048, 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 38, 22
_SECCOMP_MODE_FILTER = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITY_VERSION_3 = 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Moves this process, or its next children, into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None = None, *, flags: int = 0, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount {kind or source} on {target}")


def pivot_root_here() -> None:
    """Makes the current folder, which is a mount, the root, and detaches the old root."""
    number = _PIVOT_ROOT[platform.machine()]
    # The old root is stacked on the new one, so that no folder for it is needed.
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def prctl(option: int, value: int, extra: int = 0) -> None:
    arguments = (ctypes.c_ulong(value), ctypes.c_ulong(extra), ctypes.c_ulong(0), ctypes.c_ulong(0))
    _check(_libc.prctl(option, *arguments), f"prctl {option}")


def drop_capabilities() -> None:
    """Gives up all capabilities of this process. With no_new_privs, what it executes gets none either."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    empty = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice 32 bits each
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(empty)), "capset")


def install_seccomp(program: bytes) -> None:
    """Filters the system calls of this process and its children from now on.

    Args:
        program: instructions of classic BPF, 8 bytes each.
    """
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    filter_program = ctypes.create_string_buffer(header, len(header))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(filter_program))


def start_loopback() -> None:
    """Activates the loopback interface of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(opened, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(opened, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
