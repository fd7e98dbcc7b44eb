"""Freed memory stays with the process, measured in programs with and without the settings."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from rlscale.training.cpu.allocator import keep_freed_memory

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resident_mb()
block = bytearray(b"x") * (64 * 2**20)
del block
print(resident_mb() - before)
"""


def printed_by(program: str) -> dict[str, float]:
    """The number that a program prints with the settings and without."""
    printed = {}
    for word in ("keep", "plain"):
        done = subprocess.run([sys.executable, "-c", program, word], check=True, capture_output=True, text=True)
        printed[word] = float(done.stdout)
    return printed


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the settings")
def test_freed_memory_stays_with_the_process() -> None:
    grown = printed_by(PROGRAM)
    assert grown["keep"] > 60
    assert grown["plain"] < 10


IN_A_THREAD = """
import ctypes, resource, sys, threading
from rlscale.training.cpu.allocator import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
faults = []

def step():
    blocks = [libc.malloc(20 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 20 << 20)
    for block in blocks:
        libc.free(block)

def work():
    step()
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
print(faults[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the settings")
def test_freed_memory_of_a_thread_stays_with_the_process() -> None:
    faults = printed_by(IN_A_THREAD)
    assert faults["plain"] > 1000 > 100 > faults["keep"]
