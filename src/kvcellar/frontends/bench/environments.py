"""Folders of pinned packages that peers run in (`make peers`, or `python -m kvcellar.frontends.bench.environments`).

A folder is put before this interpreter's own packages, so a peer runs on the same torch and sees its own transformers
where it needs another. Packages are installed without their dependencies, so none can bring a second torch; what
they really need is in the list. A folder is renamed into place once it is whole.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...errors import MissingExtra, StorageError
from ...profile import home

LISTS = Path(__file__).parent / "outside_peers"
MARK = "kvcellar-environment.txt"


@dataclass(frozen=True)
class Environment:
    """The packages of `outside_peers/NAME.txt`; without a name, those of this interpreter."""

    name: str | None = None

    @property
    def folder(self) -> Path:
        return home() / "peers" / str(self.name)

    @property
    def wanted(self) -> str:
        """What the folder must be made of: the list, and the Python its compiled packages are for."""
        listed = (LISTS / f"{self.name}.txt").read_text(encoding="utf-8")
        return f"# Python {sys.version_info.major}.{sys.version_info.minor}\n{listed}"

    @property
    def current(self) -> bool:
        if self.name is None:
            return True
        try:
            return (self.folder / MARK).read_text(encoding="utf-8") == self.wanted
        except OSError:
            return False

    def require(self) -> None:
        """Raise MissingExtra when the environment is not there or is not made of the packages listed now."""
        if not self.current:
            state = "is made of other packages" if self.folder.is_dir() else "is not there"
            raise MissingExtra(f"the peers' environment {self.name} {state}; `make peers` makes it")

    def variables(self) -> dict[str, str]:
        """What a process needs to run in it: its folder, before all others."""
        if self.name is None:
            return {}
        others = os.environ.get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([str(self.folder), *([others] if others else [])])}

    def make(self) -> None:
        """Install the packages, replacing an older folder once the new one is whole. Raises StorageError."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{self.name}-", dir=self.folder.parent) as scratch:
            new = Path(scratch) / "new"
            pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--quiet"]
            listed = ["--requirement", str(LISTS / f"{self.name}.txt")]
            done = subprocess.run([*pip, "--target", str(new), *listed], stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                raise StorageError(_reason(done.stderr))
            (new / MARK).write_text(self.wanted, encoding="utf-8")
            if self.folder.exists():
                self.folder.rename(Path(scratch) / "old")
            new.rename(self.folder)


def _reason(errors: str) -> str:
    said = [line for line in errors.splitlines() if line.startswith("ERROR")]
    return " ".join(said or errors.splitlines()[-1:]) or "pip failed and said nothing"


HERE = Environment()
ENVIRONMENTS = tuple(map(Environment, ("codecs", "lmcache", "kvpress")))


def main() -> int:
    """Make every environment that is not current; 1 when one could not be made, the others are usable."""
    failed = 0
    for number, environment in enumerate(ENVIRONMENTS, 1):
        label = f"[{number}/{len(ENVIRONMENTS)}] {environment.name}"
        if environment.current:
            print(f"{label}: current", flush=True)
            continue
        print(f"{label}: installing …", flush=True)
        try:
            environment.make()
        except (StorageError, OSError) as error:
            failed += 1
            print(f"{label}: failed: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{label}: done, {environment.folder}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
