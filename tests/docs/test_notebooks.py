"""The notebooks: how each begins and ends, and that one with a cell that fails ends the build of the pages."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

# They come with the extra `docs`. `dev.py docs` cannot miss them: its first step, the build of the pages, needs them.
pytest.importorskip("myst_nb")
nbformat = pytest.importorskip("nbformat")

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "bucket", "equinox", "first-steps", "from-orbax", "mesh-and-processes", "nnx-optax-data",
    ]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_a_title_an_introduction_and_no_output(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first, *others = notebook.cells
    assert first.cell_type == "markdown"
    title, blank, said = first.source.split("\n")[:3]
    assert (title[:2], blank, bool(said)) == ("# ", "", True)
    code = [cell for cell in others if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    asserted = [any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cell.source))) for cell in code]
    assert any(asserted[-2:]), "it ends with an assertion; after that it may clean up"


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "fails"), [("assert 1 + 1 == 2", False), ("assert 1 + 1 == 3", True)])
def test_a_cell_that_fails_ends_the_build(cell: str, fails: bool, tmp_path: Path) -> None:
    cells = [nbformat.v4.new_markdown_cell("# A title"), nbformat.v4.new_code_cell(cell)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "index.ipynb")
    ours = {name: value for name, value in runpy.run_path(str(DOCS / "conf.py")).items() if name.startswith("nb_")}
    ours["nb_execution_cache_path"] = str(tmp_path / "kept")
    settings = {"extensions": ["myst_nb"], **ours}
    (tmp_path / "conf.py").write_text("".join(f"{name} = {value!r}\n" for name, value in settings.items()))
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(tmp_path), str(tmp_path / "built")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode != 0, "AssertionError" in done.stdout + done.stderr) == (fails, fails), done
