import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from rlscale.training.host_memory import keep_freed_memory

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resident_mb()
block = bytearray(b"x") * (64 * 2**20)
del block
print(resident_mb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the settings")
def test_freed_memory_stays_with_the_process() -> None:
    grown = {}
    for word in ("keep", "plain"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, word], check=True, capture_output=True, text=True)
        grown[word] = float(done.stdout)
    assert grown["keep"] > 60
    assert grown["plain"] < 10
