"""Settings of the unit tests: a fixed answer in place of a query of SGLang's interpreter.

Every config of an SGLang server needs the packages of its interpreter. The query starts a process, which a unit test
must not do, and its result depends on the machine.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlscale.config.passthrough import sglang_args, sglang_python
from rlscale.config.passthrough.recorded import read_recorded
from rlscale.config.passthrough.sglang_python import InstalledPackages, find_python


@pytest.fixture(scope="module", autouse=True)
def default_interpreter_has_sglang() -> Iterator[None]:
    """Gives the default interpreter the tested SGLang, the router and the platform plugin.

    The scope is the module, so that it precedes fixtures of a module and ends before tests in tests/ranks.
    """
    tested = read_recorded(sglang_args.RECORDED).version
    packages = InstalledPackages(sglang=tested, router="0.3.2", plugins=(sglang_python.PLATFORM,))
    query = sglang_python.installed_packages

    def recorded_packages(python: Path) -> InstalledPackages:
        return packages if python == find_python(None) else query(python)

    with pytest.MonkeyPatch.context() as patch:
        for module in (sglang_python, sglang_args):
            patch.setattr(module, "installed_packages", recorded_packages)
        yield
