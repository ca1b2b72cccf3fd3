"""Imports go down, never up or sideways between programs: the floors of the house."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxdp

ROOT = Path(jaxdp.__file__).parent

# from the ground up; a module may import from its own floor and those below
FLOORS = [
    {"errors", "types", "trees", "mesh", "peers", "hlo", "plan", "sizes", "columns", "wording"},
    {"collectives"},
    {
        "sync",
        "state",
        "models",
        "data",
        "losses",
        "optim",
        "freeze",
        "config",
        "loss_path",
        "loss_scale",
    },
    {"gradients", "steps"},
    {"checkpoints", "evaluation", "guard"},
    {"feeding", "loop", "meter", "report", "runtime"},
    {"assemble"},
    {"comparison", "choosing"},
    {"training", "checking"},
    {"train", "compare", "check", "checkpoint", "launch"},
]
HEIGHT = {name: height for height, names in enumerate(FLOORS) for name in names}
PROGRAMS = FLOORS[-1]


def imports_of(path: Path) -> set[str]:
    """The floors' names that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        parts = (name.split(".") for name in names)
        found |= {part[1] for part in parts if part[0] == "jaxdp" and len(part) > 1}
    return found & HEIGHT.keys()


def modules():
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def floor_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    floor = floor_of(path)
    assert floor in HEIGHT, f"{floor} has no floor yet: add it to FLOORS"
    above = {name for name in imports_of(path) if HEIGHT[name] > HEIGHT[floor]}
    assert not above, f"{path.name} imports from above: {above}"
    assert not (imports_of(path) & PROGRAMS - {floor}), "programs hold nothing to be imported"


def test_a_wrong_import_would_be_seen(tmp_path):
    wrong = tmp_path / "step.py"
    wrong.write_text("def f():\n    from jaxdp import training\n    import jaxdp.loop\n")
    assert imports_of(wrong) == {"training", "loop"}


def test_shard_map_has_one_caller():
    callers = {floor_of(path) for path in modules() if "shard_map(" in path.read_text()}
    assert callers == {"mesh"}


def test_every_public_name_is_there():
    assert all(getattr(jaxdp, name) is not None for name in jaxdp.__all__)
    assert set(jaxdp.__all__) == set(jaxdp._HOMES)
    # a function jaxdp.x beside a module jaxdp/x.py would be replaced by it on import
    assert not set(jaxdp.__all__) & HEIGHT.keys()


@pytest.mark.parametrize(
    "module",
    [
        "jaxdp",
        "jaxdp.config",
        "jaxdp.train",
        "jaxdp.compare",
        "jaxdp.check",
        "jaxdp.checkpoint",
        "jaxdp.launch",
        "jaxdp.runtime.joining",
    ],
)
def test_no_jax_before_it_is_needed(module):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
