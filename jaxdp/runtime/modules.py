"""Whether a module can be run, found out without importing anything: that might import JAX."""

import sys
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from jaxdp.errors import UserError

_NOT_HERE = {
    "jaxdp.compare": "it starts its processes itself: python -m jaxdp.compare --nproc-per-node N",
    "jaxdp.check": "it is one process, with as many emulated devices as the configuration has",
    "jaxdp.launch": "that is this program",
}


def check_module(name: str) -> None:
    """Looks for a module as `python -m` would, without importing it, nor its packages.

    Raises:
      UserError: there is none.
    """
    if name.endswith(".py") or "/" in name:
        raise UserError(f"-m {name}: a file; expected the name of a module, without .py")
    if name in _NOT_HERE:
        raise UserError(f"-m {name}: {_NOT_HERE[name]}")
    parts, paths = name.split("."), None
    for i in range(len(parts)):
        spec = _find(".".join(parts[: i + 1]), paths)
        if spec is None:
            close = get_close_matches(parts[i], [m.name for m in iter_modules(paths)], n=1)
            hint = f"; did you mean {'.'.join([*parts[:i], close[0]])}?" if close else ""
            raise UserError(f"-m {name}: no such module{hint}")
        paths = spec.submodule_search_locations
        if paths is None and i < len(parts) - 1:
            package = ".".join(parts[: i + 1])
            raise UserError(f"-m {name}: no such module: {package} is no package")
    if paths is not None and _find(f"{name}.__main__", paths) is None:
        raise UserError(f"-m {name}: a package without __main__; expected a module in it")


def _find(name: str, paths: Any) -> ModuleSpec | None:
    """Like importlib's find_spec, which would import the packages above."""
    found = (_ask(finder, name, paths) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def _ask(finder: Any, name: str, paths: Any) -> ModuleSpec | None:
    try:
        return finder.find_spec(name, paths)
    except KeyError:  # a folder without __init__.py: looks for the package above among the imported
        return _folders(name, paths)


def _folders(name: str, paths: Any) -> ModuleSpec | None:
    """A package that is nothing but folders."""
    inner = [Path(path, name.rpartition(".")[2]) for path in paths or ()]
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder) for folder in inner if folder.is_dir()]
    return spec if spec.submodule_search_locations else None
