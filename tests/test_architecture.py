"""The house rules that imports show: one direction, one door to private torch, one file that names collectives."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "crossfade"
STAGES = (
    "capture", "shard", "simplify", "communicate", "schedule", "finish", "execute", "collective_matmul", "emulated",
    "ranks", "report", "check",
)  # fmt: skip
BELOW = {
    "errors": (),
    "tracebacks": (),
    "graph": (),
    "files": ("graph",),
    "cost": ("graph", "files"),
    **dict.fromkeys(STAGES, ("graph", "files", "cost")),
    "compile": ("graph", "files", "cost", *STAGES),
    "demo": ("graph", "files", "cost", *STAGES, "compile"),
    "forecast": ("graph", "files", "cost", *STAGES, "compile"),
    "search": ("graph", "files", "cost", *STAGES, "compile", "forecast"),
    "commands": ("graph", "files", "cost", *STAGES, "compile", "demo", "forecast", "search"),
    "integrations": ("graph", "capture", "execute", "report", "compile"),
    "__init__": ("graph", "files", "cost", *STAGES, "compile", "integrations", "forecast", "search"),
    "passes": ("graph", "compile"),
    "__main__": ("commands",),
}
"""For each room the rooms that it may import, besides itself and `EVERYWHERE`: stages never see each other."""
EVERYWHERE = ("errors", "tracebacks")
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    ours = [name.split(".")[1] for name in imports(path) if name.startswith("crossfade.")]
    assert [target for target in ours if target not in (room(path), *EVERYWHERE, *BELOW[room(path)])] == []


def test_every_module_is_in_a_room() -> None:
    assert {room(path) for path in FILES} == BELOW.keys()
    assert sorted(path.name for path in PACKAGE.glob("*.py")) == [
        "__init__.py",
        "__main__.py",
        "errors.py",
        "passes.py",
        "tracebacks.py",
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_torch_is_imported_in_one_file(path: Path) -> None:
    if path.name == "private.py":
        return
    allowed = {"torch.distributed._functional_collectives"}  # registers the collectives' shape rules; one file
    private = [
        name
        for name in imports(path)
        if name.startswith("torch.") and any(part.startswith("_") and part != "__future__" for part in name.split("."))
    ]
    assert [name for name in private if not (name in allowed and path.name == "collectives.py")] == []


def test_collectives_are_named_in_one_file() -> None:
    assert [path.name for path in FILES if "_c10d_functional" in path.read_text()] == ["collectives.py"]


def test_files_are_rooms_not_warehouses() -> None:
    long = [path.name for path in FILES if len(path.read_text().splitlines()) > 500]
    assert [name for name in long if name != "private.py"] == []  # which is a list of what torch hides


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imported_modules(path: Path) -> set[str]:
    """Our modules that a file imports, wherever: inside functions and for type checking as well."""
    return {name if name in MODULES else name.rpartition(".")[0] for name in imports(path)} & MODULES.keys()


@pytest.mark.parametrize("name", sorted({room(path) for path in FILES}))
def test_no_room_imports_in_a_circle(name: str) -> None:
    inside = {module for module, path in MODULES.items() if room(path) == name}
    waiting = {module: (imported_modules(MODULES[module]) & inside) - {module} for module in inside}
    while free := [module for module, needed in waiting.items() if not needed & waiting.keys()]:
        for module in free:
            del waiting[module]
    assert sorted(waiting) == []  # a circle, and what stands above it


def own_names(tree: ast.AST) -> set[str]:
    """The names that a file defines, as functions, classes, fields, or attributes of `self`."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name("self")):
                names.add(name)
    return names


def foreign_private_attributes(path: Path) -> list[str]:
    """Private attributes that a file asks objects of others for; `aten._to_copy` is an operator's name, and private
    names of the standard library are read in the open (`sys._getframe`)."""
    tree = ast.parse(path.read_text())
    own = own_names(tree) | {"_replace", "_asdict", "_fields"}  # of a NamedTuple: documented
    public = {"aten", "_aten", "_ops", "torch.ops", "torch.ops.aten", "sys", "os", "functools", "pickle"}
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name):
                pass
            case ast.Call(func=ast.Name("getattr" | "hasattr" | "setattr"), args=[value, ast.Constant(str(name)), *_]):
                pass
            case _:
                continue
        if name.startswith("_") and not name.startswith("__") and name not in own and ast.unparse(value) not in public:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


OF_FRAMEWORKS = {
    "accelerate": ("._is_accelerate_prepared",),
    "transformers": ("._wrap_model",),
    "lightning": ("._trainer", "._hparams"),
}
"""What an integration has to know of its framework for which there is no public name."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_attributes_are_asked_for_in_one_file(path: Path) -> None:
    assert (
        path.name == "private.py"
        or [found for found in foreign_private_attributes(path) if not found.endswith(OF_FRAMEWORKS.get(path.stem, ()))]
        == []
    )
