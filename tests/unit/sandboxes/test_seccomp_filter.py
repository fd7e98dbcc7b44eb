"""The filter of system calls, run by a small interpreter of classic BPF."""

import errno
import struct

import pytest

from rlscale.sandboxes.seccomp_filter import ARCHITECTURES, build_filter

ALLOW, KILL = 0x7FFF0000, 0x80000000
DENY, MISSING = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


def run_filter(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    program = [struct.unpack("HBBI", chunk) for chunk in _chunks(build_filter(machine))]
    audit = ARCHITECTURES[machine] if architecture is None else architecture
    data = struct.pack("<IIQ6Q", number, audit, 0, *arguments, *([0] * (6 - len(arguments))))
    position = accumulator = 0
    while True:
        code, if_true, if_false, value = program[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return value
        else:
            matches = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            position += if_true if matches else if_false


def _chunks(program: bytes) -> list[bytes]:
    return [program[i : i + 8] for i in range(0, len(program), 8)]


@pytest.mark.parametrize(
    ("machine", "number", "arguments", "result"),
    [
        ("x86_64", 0, (), ALLOW),  # read
        ("x86_64", 59, (), ALLOW),  # execve
        ("x86_64", 165, (), DENY),  # mount
        ("x86_64", 272, (), DENY),  # unshare
        ("x86_64", 425, (), DENY),  # io_uring_setup
        ("x86_64", 435, (), MISSING),  # clone3
        ("x86_64", 56, (17,), ALLOW),  # clone with SIGCHLD
        ("x86_64", 56, (0x10000011,), DENY),  # ... in a user namespace
        ("x86_64", 41, (1,), ALLOW),  # socket of AF_UNIX
        ("x86_64", 41, (2,), ALLOW),
        ("x86_64", 41, (10,), ALLOW),
        ("x86_64", 41, (16,), ALLOW),
        ("x86_64", 41, (40,), DENY),  # AF_VSOCK
        ("x86_64", 302, (0,), ALLOW),  # prlimit64 of the process itself
        ("x86_64", 302, (1,), DENY),
        ("x86_64", 141, (0, 0), ALLOW),  # setpriority
        ("x86_64", 141, (0, 1), DENY),
        ("x86_64", 0x40000000 + 59, (), DENY),  # execve of the x32 ABI
        ("aarch64", 63, (), ALLOW),  # read
        ("aarch64", 40, (), DENY),  # mount
        ("aarch64", 198, (40,), DENY),
        ("aarch64", 220, (17,), ALLOW),
        ("aarch64", 220, (0x20000011,), DENY),
    ],
)
def test_system_calls(machine: str, number: int, arguments: tuple[int, ...], result: int) -> None:
    assert run_filter(machine, number, *arguments) == result


def test_calls_of_another_architecture_end_the_program() -> None:
    assert run_filter("x86_64", 0, architecture=0x40000003) == KILL  # i386, whose numbers differ


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(OSError, match="no system call filter for riscv64; known are x86_64, aarch64"):
        build_filter("riscv64")
