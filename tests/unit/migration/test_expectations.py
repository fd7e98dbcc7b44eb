"""Translations of whole inputs compared with expectations that were written by hand."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import rlscale
from rlscale.migration.findings import Kind
from tests.unit.migration.scripts import find
from tests.unit.migration.test_migrate import kinds, values

FILE = Path(__file__).resolve().parents[2] / "data" / "migration_expectations.yaml"
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())


def plain(value: Any) -> Any:
    """A value that YAML reads as text although OmegaConf reads a number: `1e-6`."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_translation_is_as_expected(name: str) -> None:
    expected, found = EXPECTED[name], rlscale.migrate(find(name))
    own = values(found)
    assert {path: plain(own.get(path, "not set")) for path in expected["values"]} == expected["values"]
    for group, option in expected.get("options", {}).items():
        assert f"  - override /{group}: {option}\n" in found.yaml
    if "lost" in expected:
        lost = {finding.subject.split()[0] for finding in found.places.values() if finding.kind is Kind.lost}
        assert lost == set(expected["lost"])
        assert kinds(found, Kind.unresolved) == set()
