"""Preparation of the tests of observe, which start no process."""

import platform

# Provenance records `platform.platform()`. Its first call starts `uname -p`; Python caches the result. This line runs
# at collection, before the guard of tests/conftest.py.
platform.platform()
