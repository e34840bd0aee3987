"""Stages from other packages: the documented example, and what a file or a broken package can do with the way in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import kvcellar
from archives import contents_at, contents_of, same
from clitools import run
from kvcellar import plugins, stages
from kvcellar.errors import InvalidRecipe

PAGE = (Path(__file__).parent.parent / "docs" / "adding-a-stage.md").read_text()
CODER = """
from kvcellar.symbols.byteplanes import BytePlanes
class Mine(BytePlanes):
    id = "mine/1"
number = 7
"""
Install = Callable[..., Path]


def code(language: str, name: str = "") -> str:
    """The one block of the page in `language`, below the line that names its file."""
    before = rf"`{re.escape(name)}`[^\n]*\n+" if name else ""
    (found,) = re.findall(rf"{before}```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a module and a package's metadata into a folder on the module path, as pip would; gives the folder."""
    loaded = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages, "_loaded", {})

    def put(points: dict[str, str], source: str = CODER, module: str = "mine", package: str = "pkg") -> Path:
        folder = tmp_path / "site"
        if str(folder) not in sys.path:
            folder.mkdir()
            monkeypatch.syspath_prepend(str(folder))
        write_package(folder, points, source, module, package)
        return folder

    yield put
    for name in set(sys.modules) - loaded:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def path_with(folder: Path | str) -> str:
    """PYTHONPATH with a folder in front; "" is the current one."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def write_package(folder: Path, points: dict[str, str], source: str, module: str, package: str) -> None:
    (folder / f"{module}.py").write_text(source)
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[kvcellar.stages]", *lines, ""]))


def page_package(install: Install) -> Path:
    points = tomllib.loads(code("toml"))["project"]["entry-points"]["kvcellar.stages"]
    return install(points, code("python", "deltastage.py"), "deltastage", "kvcellar-example-delta")


def test_the_page_s_stage_passes_the_page_s_tests(install: Install) -> None:
    folder = page_package(install)
    (folder / "test_deltastage.py").write_text(code("python", "test_deltastage.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder / "test_deltastage.py"],
        cwd=folder.parent,  # the current folder is not searched
        env={**os.environ, "PYTHONPATH": path_with(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 200
    assert "skipped" not in done.stdout


def test_the_page_s_recipe_saves_and_opens(
    install: Install, make_cache: Callable, make_ids: Callable, saved: Callable
) -> None:
    page_package(install)
    path = saved(make_cache(), recipe=json.loads(code("json")))
    assert same(contents_at(path), contents_of(make_cache(), make_ids(40)))
    assert stages.build("symbols", json.loads(code("json"))["symbols"]).level == 9


def test_the_page_s_example_is_short() -> None:
    assert len(code("python", "deltastage.py").splitlines()) <= 48


def test_a_file_needs_the_package_to_restore_but_not_to_be_looked_at(
    install: Install, make_cache: Callable, saved: Callable
) -> None:
    folder = install({"symbols:mine/1": "mine:Mine"})
    path = saved(make_cache(), recipe={**kvcellar.recipe.EXACT.to_json(), "symbols": {"id": "mine/1"}})
    del sys.modules["mine"]
    stages._loaded.clear()
    assert run("info", path).code == run("verify", path).code == 0
    assert "mine" not in sys.modules
    assert contents_at(path)
    assert "mine" in sys.modules
    (folder / "pkg-1.0.dist-info" / "entry_points.txt").unlink()
    stages._loaded.clear()
    plugins._offered.cache_clear()
    with kvcellar.open(path, identity="m") as archive, pytest.raises(InvalidRecipe, match=r"unknown.*mine/1"):
        archive.read(0, 0, 1)


@pytest.mark.parametrize(
    "stage_id", ["mine", "mine:Mine", "symbols:mine/1", "os:system", "/tmp/mine.py", "../mine/1", "", "mine/1\n"]
)
def test_an_id_is_nothing_but_a_name_to_compare(install: Install, stage_id: str) -> None:
    install({"symbols:mine/1": "mine:Mine"})
    with pytest.raises(InvalidRecipe, match=r"unknown symbols stage .*known: .*byteplanes-zstd/1.*mine/1"):
        stages.build("symbols", {"id": stage_id})
    assert "mine" not in sys.modules


def test_the_current_folder_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    download = tmp_path / "download"
    download.mkdir()
    write_package(download, {"symbols:mine/1": "mine:Mine"}, CODER, "mine", "pkg")
    ask = "from kvcellar import stages; print(type(stages.build('symbols', {'id': 'mine/1'})).__name__)"
    for word, path in (("-c", ""), ("-c", str(download))):  # "" is the current folder, too
        command = [sys.executable, word, ask]
        environment = {**os.environ, "PYTHONPATH": path_with(path)}
        here = subprocess.run(command, cwd=download, env=environment, capture_output=True, text=True, check=False)
        assert "InvalidRecipe: unknown symbols stage 'mine/1'" in here.stderr
    environment["PYTHONPATH"] = path_with(download)
    there = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert there.stdout == "Mine\n", "asked for by PYTHONPATH, from elsewhere"


def test_a_stage_that_ships_cannot_be_replaced(install: Install) -> None:
    install({"symbols:byteplanes-zstd/1": "mine:Mine"})
    assert type(stages.build("symbols", {"id": "byteplanes-zstd/1"})).__name__ == "BytePlanes"
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    ("value", "source", "why"),
    [
        ("nowhere:Mine", CODER, "cannot be loaded: ModuleNotFoundError"),
        ("mine:Other", CODER, "cannot be loaded: AttributeError"),
        ("mine:Mine", "1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("mine:Mine", "def Mine(", "cannot be loaded: SyntaxError"),
        ("mine:number", CODER, "is no SymbolCoder"),
        ("mine:Mine", "class Mine:\n    id = 'mine/1'", "is no SymbolCoder"),
        ("mine:Mine", CODER.replace("mine/1", "other/1"), "calls itself 'other/1'"),
        ("not a reference", CODER, "cannot be loaded"),
    ],
)
def test_a_broken_package_is_named_with_the_reason(install: Install, value: str, source: str, why: str) -> None:
    install({"symbols:mine/1": value}, source)
    with pytest.raises(InvalidRecipe, match=rf"symbols stage 'mine/1', installed as {value}, .*{why}"):
        stages.build("symbols", {"id": "mine/1"})


def test_a_stage_of_another_kind_is_not_found(install: Install) -> None:
    install({"symbols:mine/1": "mine:Mine"})
    with pytest.raises(InvalidRecipe, match="unknown quantize stage 'mine/1'"):
        stages.build("quantize", {"id": "mine/1"})


def test_installed_packages_are_looked_through_once(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install({"symbols:mine/1": "mine:Mine"})
    first = stages.build("symbols", {"id": "mine/1"})
    monkeypatch.setattr(plugins, "installed", None)
    assert type(stages.build("symbols", {"id": "mine/1"})) is type(first)


def test_an_id_of_two_packages_is_refused(install: Install) -> None:
    install({"symbols:mine/1": "mine:Mine"})
    install({"symbols:mine/1": "mine2:Mine"}, CODER, "mine2", "another")
    with pytest.raises(InvalidRecipe, match="more than one package: another, pkg"):
        stages.build("symbols", {"id": "mine/1"})


def test_settings_a_stage_does_not_take(install: Install) -> None:
    page_package(install)
    for settings, why in (({"levle": 3}, "TypeError.*levle"), ({"self": 1}, "TypeError"), ({"level": 10}, "1 to 9")):
        with pytest.raises(InvalidRecipe, match=why):
            stages.build("symbols", {"id": "example-delta-deflate/1", **settings})


def test_damaged_metadata_of_another_package_hinders_nobody(install: Install) -> None:
    folder = install({"symbols:mine/1": "mine:Mine"})
    broken = folder / "aaa-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Name: aaa\n")
    (broken / "entry_points.txt").write_bytes(b"[kvcellar.stages]\nno equals sign\n\xff")
    assert type(stages.build("symbols", {"id": "mine/1"})).__name__ == "Mine"
