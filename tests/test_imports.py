"""Which module may import which, and what `import kvcellar` must not load (shared/STYLE.md, "The house")."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import kvcellar

SOURCE = Path(kvcellar.__file__).parent
STAGE_FOLDERS = ("reduce", "predict", "transform", "quantize", "symbols")
CONTRACTS = {"cache", "stages", "context", "plugins", "recipe", "errors", "geometry", "identity", "profile", "replayed"}
CONTRACTS |= {"residual", "rope", "rounding", "metric", "placing", "placingkernels"}
FITTING = {"calibrate", "causalfit"}
"""What makes profiles: it runs stages, so stages know it for its types, or load it when they fit."""
MAY_IMPORT = {
    "store": {"errors", "identity"},
    "archive": {"errors", "geometry", "identity", "recipe", "store.base"},
    "search": {"errors", "symbols.maps"},
    "language": {
        *("cache", "errors", "geometry", "identity", "recipe", "store.base", "archive.format", "archive.manifest"),
        "symbols.binarycoder",  # for token ids
    },
    "evaluate": {"errors"},
}
"""What the folders beside the stages may import, to the module."""


def imported(code: str, module: str, *, package: bool = False) -> set[str]:
    """Absolute names of everything `module` imports, wherever in its code and for whatever use.

    `from a import b` names both `a` and `a.b`, since b may be a module.
    """
    found: set[str] = set()
    home = module.split(".") if package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = home[: len(home) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    return found


@cache
def modules() -> dict[str, set[str]]:
    """Every module of kvcellar and what it imports."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ["kvcellar", *path.relative_to(SOURCE).with_suffix("").parts]
        package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if package else parts)
        found[name] = imported(path.read_text(encoding="utf-8"), name, package=package)
    return found


def _within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _edges(*packages: str) -> Iterator[tuple[str, str]]:
    """(module, what it imports) for modules within `packages`."""
    for module, names in modules().items():
        if _within(module, *packages):
            yield from ((module, name) for name in sorted(names))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import torch.nn", {"torch.nn"}),
        ("from torch import nn", {"torch", "torch.nn"}),
        ("from ..errors import KVCellarError", {"kvcellar.errors", "kvcellar.errors.KVCellarError"}),
        ("from .. import stages", {"kvcellar", "kvcellar.stages"}),
        ("from . import bits", {"kvcellar.quantize", "kvcellar.quantize.bits"}),
        (
            "def f():\n    from ..symbols.kernels import join2",
            {"kvcellar.symbols.kernels", "kvcellar.symbols.kernels.join2"},
        ),
    ],
)
def test_imports_are_resolved(line: str, expected: set[str]) -> None:
    assert imported(line, "kvcellar.quantize.scalar") == expected


def test_imports_of_a_package_are_resolved() -> None:
    assert imported("from .errors import X", "kvcellar", package=True) == {"kvcellar.errors", "kvcellar.errors.X"}
    assert imported("from ..cache import X", "kvcellar.store", package=True) == {"kvcellar.cache", "kvcellar.cache.X"}


def test_all_modules_are_looked_at() -> None:
    assert len(modules()) > 25
    assert "kvcellar.residual" in modules()["kvcellar.quantize.bits"]
    assert "torch" in modules()["kvcellar.cache"]
    assert "kvcellar.store.base" in modules()["kvcellar.archive.reader"]


def _ours(package: str) -> set[tuple[str, str]]:
    """(module, module of kvcellar) for what `package` imports of kvcellar outside itself."""
    found = set()
    for module, name in _edges(f"kvcellar.{package}"):
        known = max((m for m in modules() if _within(name, m)), key=len, default="kvcellar")
        if known != "kvcellar" and not _within(known, f"kvcellar.{package}"):
            found.add((module, known.removeprefix("kvcellar.")))
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_what_it_may_and_may_import_what_it_does(folder: str) -> None:
    imports = _ours(folder)
    assert {name for _, name in imports} == MAY_IMPORT[folder], sorted(imports)


def test_the_contracts_import_each_other() -> None:
    """But `Profile.save`, which writes by a store, and what stages are told when they fit, a type."""
    found = {(m.removeprefix("kvcellar."), name) for c in CONTRACTS for m, name in _ours(c) if name not in CONTRACTS}
    assert found == {
        ("profile", "store.local"),
        *((name, "calibrate") for name in ("stages", "rope", "metric")),
    }


def test_only_what_compares_caches_and_names_a_runtime_brings_torch_to_the_language() -> None:
    heavy = {module for module, name in _edges("kvcellar.language") if _within(name, "torch", "transformers")}
    assert heavy == {"kvcellar.language.checks", "kvcellar.language.runtime"}


def test_a_stage_folder_imports_the_contracts_and_itself() -> None:
    looked_at = set()
    for folder in STAGE_FOLDERS:
        allowed = [f"kvcellar.{name}" for name in CONTRACTS | FITTING] + [f"kvcellar.{folder}"]
        for module, name in _edges(f"kvcellar.{folder}"):
            looked_at.add(folder)
            if name.partition(".")[0] == "kvcellar" and name != "kvcellar":
                assert _within(name, *allowed), f"{module} imports {name}"
    assert {"quantize", "symbols"} <= looked_at


def test_the_archive_knows_no_stage() -> None:
    for module, name in _edges("kvcellar.archive", "kvcellar.store"):
        assert not _within(name, *(f"kvcellar.{folder}" for folder in STAGE_FOLDERS)), f"{module} imports {name}"
        assert not _within(name, "kvcellar.stages", "kvcellar.pipeline"), f"{module} imports {name}"


def test_nothing_imports_a_front_end() -> None:
    """But `kvcellar/__init__.py`, lazily, and `python -m kvcellar`."""
    for module, name in _edges("kvcellar"):
        if _within(module, "kvcellar.frontends", "kvcellar.__main__") or module == "kvcellar":
            continue
        assert not _within(name, "kvcellar.frontends"), f"{module} imports {name}"


def test_the_package_imports_front_ends_only_for_the_type_checker() -> None:
    code = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    run = [n for n in code.body if not (isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING")]
    assert len(run) == len(code.body) - 1
    names = imported(ast.unparse(ast.Module(run, [])), "kvcellar", package=True)
    assert "kvcellar.errors" in names
    assert not any(_within(name, "kvcellar.frontends", "kvcellar.cache", "kvcellar.profile") for name in names)


NO_TORCH = ("symbols", "archive", "store", "search")


@pytest.mark.parametrize("folder", NO_TORCH)
def test_no_torch_below_the_quantizers(folder: str) -> None:
    assert [module for module, _ in _edges(f"kvcellar.{folder}")]
    for module, name in _edges(f"kvcellar.{folder}"):
        assert not _within(name, "torch", "transformers"), f"{module} imports {name}"


def test_no_torch_below_the_quantizers_by_way_of_another_module() -> None:
    names = [module for module in modules() if _within(module, *(f"kvcellar.{folder}" for folder in NO_TORCH))]
    assert len(names) > 20
    load = f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
    assert _run(load + "print(sorted({'torch', 'transformers'} & set(sys.modules)))") == "[]\n"


@pytest.mark.parametrize("package", ["pickle", "torch.serialization", "marshal", "shelve", "dill"])
def test_nothing_imports_pickle(package: str) -> None:
    for module, name in _edges("kvcellar"):
        assert not _within(name, package), f"{module} imports {name}"


def test_public_names_are_those_promised() -> None:
    for name in kvcellar.__all__:
        assert getattr(kvcellar, name).__module__.startswith("kvcellar"), name
        assert name in dir(kvcellar)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvcellar.nothing  # noqa: B018


def _run(code: str, *arguments: str) -> str:
    """Output of `code` in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADED = """
heavy = {"torch", "transformers", "numba", "scipy", "pandas", "matplotlib", "accelerate", "gguf", "blosc2", "jaxtyping"}
print("loaded", sorted(heavy & set(sys.modules)))
"""


def test_importing_kvcellar_loads_little_and_starts_no_thread() -> None:
    threads = """
import os, threading
tasks = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ["main"]
print("threads", threading.active_count(), len(tasks))
"""
    out = _run(f"import sys\nimport kvcellar\n{LOADED}{threads}")
    assert out == "loaded []\nthreads 1 1\n"


def test_importing_kvcellar_loads_no_dependency_of_its_stages() -> None:
    used_later = {"numpy", "zstandard", "safetensors", "portalocker", "click", "rich", "xxhash"}
    out = _run(f"import sys\nimport kvcellar\nprint(sorted({used_later!r} & set(sys.modules)))")
    assert out == "[]\n"


def test_using_kvcellar_does_load_torch() -> None:
    """So that the tests above would notice."""
    assert "torch" in _run(f"import sys\nimport kvcellar\nkvcellar.save\n{LOADED}")


INFO = """
import sys
import kvcellar
from kvcellar.archive.info import describe, verify
from kvcellar.archive.reader import ArchiveReader
from kvcellar.store.local import LocalStore

store, name = LocalStore.at(sys.argv[1])
with ArchiveReader(store.open_reader(name)) as reader:
    print(describe(reader).tokens, verify(reader).ok)
"""


def test_looking_at_an_archive_loads_no_torch(make_cache: Callable, saved: Callable) -> None:
    assert _run(INFO + LOADED, str(saved(make_cache()))) == "40 True\nloaded []\n"


@pytest.mark.parametrize("command", ["info", "verify"])
def test_commands_that_look_at_an_archive_load_no_torch(make_cache: Callable, saved: Callable, command: str) -> None:
    code = f"""
import sys
from kvcellar.frontends.cli import main
sys.argv = ["kvcellar", {command!r}, {str(saved(make_cache()))!r}]
try:
    main()
except SystemExit as stop:
    print("exit", stop.code)
"""
    out = _run(code + LOADED)
    assert out.endswith("exit 0\nloaded []\n"), out
    assert "40" in out
