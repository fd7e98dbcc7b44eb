"""The notebooks of the documentation run from their first cell to their last."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.unit.observe.report.made_run import make_run

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"


def execute(name: str, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its results, run in `folder`."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    return NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()


def results(notebook: nbformat.NotebookNode) -> list[str]:
    """The text that each cell of code shows."""
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(o.get("data", {}).get("text/plain", "") for o in cell) for cell in outputs]


def test_the_notebook_of_the_algorithms_runs(tmp_path: Path) -> None:
    shown = results(execute("algo", tmp_path))
    assert "0.8660" in shown[0], "advantages of a group with two right answers of four"
    assert "pg_clipfrac" in shown[1]


def test_the_notebook_of_the_run_folder_reads_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.setenv("RLSCALE_RUN", str(tmp_path))
    notebook = execute("run_folder", tmp_path)
    shown = results(notebook)
    assert "Figure" in shown[1]
    assert "logprob_diff/mean" in shown[2]
    assert "token_ids" in shown[3]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_committed_notebook_has_no_results(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.outputs for cell in cells if cell.cell_type == "code" and cell.outputs] == []
