"""Wheel and sdist: built, looked into, and installed into an environment that has the core dependencies alone."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvcellar

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"kvcellar-{kvcellar.__version__}"
SAVE = """
from safetensors.torch import save_file
import importlib.metadata, sys
import kvcellar, torch
assert kvcellar.__file__.startswith(sys.prefix), kvcellar.__file__
assert importlib.metadata.version("kvcellar") == kvcellar.__version__
cache = [(torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)) for _ in range(3)]
kvcellar.save("a.kvc", cache, tokens=list(range(40)), identity="m")
with kvcellar.open("a.kvc", identity="m") as archive:
    keys, values = archive.read(1, 5, 25)
    assert torch.equal(keys, cache[1][0][0, :, 5:25]) and torch.equal(values, cache[1][1][0, :, 5:25])
    try:
        archive.restore()
    except kvcellar.errors.MissingExtra as error:
        print(error)
save_file({f"{i:03}": t.contiguous() for i, t in enumerate(t for pair in cache for t in pair)}, "cache.safetensors")
"""
RESTORE = """
import sys
import kvcellar, torch
from safetensors.torch import load_file
assert kvcellar.__file__.startswith(sys.prefix), kvcellar.__file__
with kvcellar.open("a.kvc", identity="m") as archive:
    restored = archive.restore()
before = [tensor for _, tensor in sorted(load_file("cache.safetensors").items())]
after = [side for layer in restored.cache.layers for side in (layer.keys, layer.values)]
assert len(before) == len(after) and all(map(torch.equal, before, after))
print(type(restored.cache).__name__, restored.matched)
"""


def checked(*command: object, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must end well."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, out: Path, *targets: str) -> None:
    words = [word for target in targets for word in ("-t", target)]
    path = os.environ.get("PYTHONPATH", "")
    checked(sys.executable, "-m", "hatchling", "build", "-d", out, *words, cwd=source, PYTHONPATH=path)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="the build back end is not installed: pip install 'kvcellar[dev]'")
    out = tmp_path_factory.mktemp("sdist")
    build(ROOT, out, "sdist")
    (found,) = out.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the unpacked sdist, as pip does where there is no wheel."""
    out = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as file:
        file.extractall(out, filter="data")
    build(out / NAME, out, "wheel")
    (found,) = out.glob("*.whl")
    return found


def own_files() -> set[str]:
    files = (path for path in (ROOT / "src" / "kvcellar").rglob("*") if path.is_file())
    return {path.relative_to(ROOT / "src").as_posix() for path in files if "__pycache__" not in path.parts}


def test_the_sdist_holds_code_tests_and_docs(sdist: Path) -> None:
    assert sdist.name == f"{NAME}.tar.gz"
    with tarfile.open(sdist) as file:
        names = {name.removeprefix(f"{NAME}/") for name in file.getnames()}
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("*.py")}
    assert names >= {f"src/{name}" for name in own_files()} | pages | tests
    golden = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "golden").iterdir()}
    assert golden
    assert names >= {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "constraints.txt"} | golden
    litter = [name for name in names if re.search(r"__pycache__|\.venv|\.git/|\.egg-info|_cache/", name)]
    assert not litter


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        metadata = Parser().parsestr(file.read(f"{NAME}.dist-info/METADATA").decode())
        licence = file.read(f"{NAME}.dist-info/licenses/LICENSE")
        points = file.read(f"{NAME}.dist-info/entry_points.txt").decode()
    assert {name for name in names if not name.startswith(f"{NAME}.dist-info/")} == own_files()
    assert "kvcellar/py.typed" in names
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert "kvcellar = kvcellar.frontends.cli:main" in points
    assert (metadata["Name"], metadata["Version"]) == ("kvcellar", kvcellar.__version__)
    assert metadata["License-Expression"] == PROJECT["license"]
    asked = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    assert {r.name for r in asked if not r.marker} == {Requirement(line).name for line in PROJECT["dependencies"]}


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    assert "version" not in PROJECT
    stated = re.compile(rf"^[^#\n]*version\S* = [\"']{re.escape(kvcellar.__version__)}[\"']", re.MULTILINE)
    files = [ROOT / "pyproject.toml", *(ROOT / "src").rglob("*.py")]
    assert [path.name for path in files if stated.search(path.read_text())] == ["__init__.py"]


def core_packages() -> set[str]:
    """Names of what pip would install beside kvcellar without extras."""
    found: set[str] = set()
    wanted = [Requirement(line) for line in PROJECT["dependencies"]]
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        wanted += [Requirement(line) for line in importlib.metadata.requires(name) or []]
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel, and links to the core dependencies that are installed here."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet"]
    checked(*pip, "--no-deps", "--no-index", wheel, cwd=folder)
    site = Path(checked(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    for name in core_packages():
        package = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(package.locate_file(top))))
    return folder


def test_the_installed_wheel_works_with_the_core_dependencies_alone(environment: Path, tmp_path: Path) -> None:
    python, command = environment / "bin" / "python", environment / "bin" / "kvcellar"
    absent = checked(python, "-c", "import importlib.util as u; print(u.find_spec('transformers'))", cwd=tmp_path)
    assert absent == "None\n"
    assert "pip install 'kvcellar[hf]'" in checked(python, "-c", SAVE, cwd=tmp_path)
    assert checked(command, "--version", cwd=tmp_path).split()[-1] == kvcellar.__version__
    assert "tokens     40 in 1 blocks" in checked(command, "info", "a.kvc", cwd=tmp_path)
    assert "every part is sound" in checked(python, "-m", "kvcellar", "verify", "a.kvc", cwd=tmp_path)
    assert "40 of 40" in checked(command, "restore", "a.kvc", "--out", "o.safetensors", cwd=tmp_path)
    here = sysconfig.get_path("purelib")  # with transformers, kvcellar itself still being the wheel's
    assert checked(python, "-c", RESTORE, cwd=tmp_path, PYTHONPATH=here) == "DynamicCache 40\n"
