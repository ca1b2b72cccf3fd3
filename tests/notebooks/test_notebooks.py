"""The notebooks run from a fresh kernel, and what is stored of them is fit to be read."""

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 200_000
CELL_S = 120

each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


class ThisPython(AsyncKernelManager):
    """A kernel of the interpreter that runs the tests, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, language="python")


def read(path: Path):
    return nbformat.read(path, as_version=4)


def run(notebook) -> None:
    """Executes in place.  Raises CellExecutionError at the first cell that fails."""
    resources = {"metadata": {"path": str(FOLDER)}}
    with tempfile.TemporaryDirectory() as folder:  # pytest's are too long for a socket's name
        # IPC: no port, and no warning about what is sent over one
        config = Config({"ThisPython": {"transport": "ipc", "ip": f"{folder}/kernel"}})
        client = NotebookClient(
            notebook,
            kernel_manager_class=ThisPython,
            config=config,
            timeout=CELL_S,
            resources=resources,
        )
        client.execute(env=os.environ | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": folder})


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook) -> list:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def shown(output) -> str:
    """What an output says in words."""
    return output.get("text", "") + output.get("data", {}).get("text/plain", "")


def kinds(cell) -> set[str]:
    """The forms in which a cell shows something: text on a stream, or MIME types."""
    found = {"text" for output in cell.outputs if output.output_type == "stream"}
    return found | {kind for output in cell.outputs for kind in output.get("data", {})}


def test_all_four_are_there():
    assert [path.stem[:2] for path in PATHS] == ["01", "02", "03", "04"]


@each_notebook
def test_runs_from_a_fresh_kernel(path):
    stored, notebook = read(path), read(path)
    for cell in code_cells(notebook):
        cell.outputs = []
    run(notebook)
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    # what it shows now is what it showed when it was stored, figures apart
    assert [kinds(cell) for cell in code_cells(notebook)] == [
        kinds(cell) for cell in code_cells(stored)
    ]


@pytest.mark.parametrize("name", [path.name for path in PATHS])
def test_n1_device_count_after_jax_has_started(name):
    notebook = read(FOLDER / name)
    first = code_cells(notebook)[0]
    wanted = re.search(r"jaxdp\.emulate\((\d+)\)", first.source)
    assert wanted
    started = 'import jax\njax.config.update("jax_num_cpu_devices", 2)\njax.devices()'
    notebook.cells = [nbformat.v4.new_code_cell(started), *notebook.cells]
    with pytest.raises(CellExecutionError) as error:
        run(notebook)
    assert error.value.ename == "UserError"
    message = error.value.evalue
    assert f"{wanted[1]} were asked for after JAX had started with 2" in message
    remedy = "restart Python (in a notebook, the kernel) and begin with"
    assert f"{remedy} jaxdp.emulate({wanted[1]})" in message


@each_notebook
def test_form(path):
    notebook = read(path)
    nbformat.validate(notebook)
    title, first = notebook.cells[:2]
    assert title.source.startswith("# ")
    assert re.fullmatch(r"import jaxdp\n\njaxdp\.emulate\(\d+\).*", first.source)
    sections = [cell.source for cell in notebook.cells if "\n## " in f"\n{cell.source}"]
    assert sections[-1] == notebook.cells[-1].source
    last = re.split(r"^## ", sections[-1], flags=re.MULTILINE)[-1]
    heading, *rest = last.splitlines()
    assert heading == "Change something"
    assert 2 <= sum(line.startswith("- ") for line in rest) <= 3


@each_notebook
def test_stored_outputs(path):
    text = path.read_text()
    assert len(text.encode()) < MAX_BYTES
    assert not re.search(r"/(home|root|tmp|usr|Users)/|[A-Z]:\\\\", text), "a path of some machine"
    notebook = read(path)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(
        range(1, len(code_cells(notebook)) + 1)
    )
    assert all(output.output_type != "error" for output in outputs(notebook))
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    assert not re.search("warning|deprecat", "".join(map(shown, outputs(notebook))), re.IGNORECASE)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert not any(cell.metadata for cell in notebook.cells), "timings, or an editor's traces"


def test_a_cell_that_fails_is_seen():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run(notebook)


def test_the_kernel_is_this_python():
    code = "import sys, jaxdp; print(sys.executable); print(jaxdp.__file__)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    run(notebook)
    executable, package = shown(outputs(notebook)[0]).split()
    assert executable == sys.executable
    assert Path(package) == ROOT / "jaxdp" / "__init__.py"
