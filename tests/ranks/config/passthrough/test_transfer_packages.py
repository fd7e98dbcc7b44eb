"""The packages that send the KV cache from prefill to decode servers, in the interpreter of SGLang."""

from pathlib import Path

from rlscale.config.passthrough.sglang_python import check_transfer, installed_packages
from tests.unit.config.interpreters import fake_interpreter


def test_the_package_of_each_backend_is_searched_next_to_sglang(tmp_path: Path) -> None:
    python = fake_interpreter(tmp_path)
    (tmp_path / "site" / "mooncake").mkdir()
    (tmp_path / "site" / "mooncake" / "__init__.py").touch()
    assert installed_packages(python).modules == ("mooncake",)
    given = str(python)
    assert check_transfer(given, {None}) == check_transfer(given, {"mooncake", "mooncake_tcp", "ascend"}) == []
    (found,) = check_transfer(given, {"nixl", None})
    assert str(found) == (
        f"sglang.disaggregation_transfer_backend must have its package nixl next to SGLang, got nixl, and {python} "
        "without it; install the package there (nixl), or choose another backend"
    )
