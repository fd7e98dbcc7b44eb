"""The public names of `rlscale` and `rlscale.algo`."""

import ast
from inspect import getdoc, isfunction
from pathlib import Path

import pytest

import rlscale
from rlscale import algo

NAMES = ["ConfigError", "RunResult", "Sample", "Trainer", "config_from_hydra", "load_config", "migrate", "register"]


def test_dir_lists_the_public_names() -> None:
    shown = set(dir(rlscale))
    assert set(NAMES) <= shown and not shown & {"Any", "TYPE_CHECKING", "import_module"}
    assert [name for name in rlscale.__all__ if not name.startswith("_")] == NAMES


def test_an_editor_sees_every_lazy_name() -> None:
    """Static analysis reads the imports under TYPE_CHECKING."""
    assert rlscale.__file__ is not None
    tree = ast.parse(Path(rlscale.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    found = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert found == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_lazy_name_can_be_imported(name: str) -> None:
    assert getattr(rlscale, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'rlscale' has no attribute 'trainer_of'"):
        rlscale.trainer_of  # noqa: B018


def test_algo_exports_its_functions() -> None:
    assert set(algo.__all__) <= set(dir(algo))
    modules = [
        module for name, module in vars(algo).items() if getattr(module, "__name__", "") == f"rlscale.algo.{name}"
    ]
    public = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    # Helpers of the package; checksums and formats of weights, which are no algorithms.
    internal = {"at_least_float32", "check_shape", "check_vectors", "masked_logprobs", "zero_masked"}
    internal |= {"check_direction", "divergence", "divergence_slopes", "log_others"}
    internal |= {"find_places", "head_terms", "scaled_logits"}
    checksums = {"block_digest", "bytes_of", "checksum", "checksum_like", "digest_of"}
    formats = {"quantize_fp8", "dequantize_fp8", "quantize_int4", "dequantize_int4"}
    assert public - internal - checksums - formats == {name for name in algo.__all__ if isfunction(getattr(algo, name))}


@pytest.mark.parametrize("name", [name for name in algo.__all__ if isfunction(getattr(algo, name))])
def test_every_function_of_algo_gives_the_names_of_other_libraries(name: str) -> None:
    text = getdoc(getattr(algo, name)) or ""
    assert any(library in text for library in ("verl", "TRL", "slime")), text
