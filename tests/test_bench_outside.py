"""Peers in processes of their own: the protocol, what a broken peer gives, and environments that are not there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcellar.errors import InvalidInput, KVCellarError, MissingExtra, StorageError
from kvcellar.frontends.bench import environments, outside
from kvcellar.frontends.bench.environments import HERE, LISTS, MARK, Environment
from kvcellar.frontends.bench.outside import OUTSIDE, Outside
from kvcellar.frontends.bench.peers import PEERS, coded_by, gives_cache

TOKENS, FOLLOWING, VOCABULARY = list(range(40)), [3, 4, 5], 11
ADAPTER = """
import os, sys
import torch
from kvcellar.frontends.bench.outside_peers.serve import answer, read_pairs, serve, write_pairs
from safetensors.torch import load_file

def load():
    print("a library's greeting")           # must not be taken for an answer
    os.system("echo from a child process")
    asked = 0

    def code(message):
        nonlocal asked
        asked += message["peer"] == "doubles"
        peer, options, pairs = message["peer"], message["options"], read_pairs(message["cache"])
        if peer == "fails":
            raise ValueError("no such codebook")
        if peer == "dies":
            sys.stderr.write("out of memory\\n")
            os._exit(7)
        if peer == "narrower":
            write_pairs(message["out"], [(k[..., 1:], v) for k, v in pairs])
        elif peer == "forgets":
            write_pairs(message["out"], pairs[:-1])
        elif peer == "widens":
            write_pairs(message["out"], [(k.double(), v) for k, v in pairs])
        elif peer == "silent":
            pass
        elif peer == "reads":
            ids = load_file(message["cache"])["tokens"]
            kept = [(k[:, ::2], v[:, :: options.get("step", 2)]) for k, v in pairs] if options.get("keeps") else []
            logits = {}
            if following := message.get("following"):
                rows = len(following) - options.get("short", 0)
                logits["logits"] = torch.full((rows - 1, 11), float(ids.sum()) + following[0])
            write_pairs(message["out"], kept, **logits)
        else:
            write_pairs(message["out"], [(k * 2, v + asked) for k, v in pairs])
        said = answer(100, 0.5, None, f"{message['model']} {os.getpid()}", payload_nbytes=60)
        return {**said, **options.get("said", {})}

    return code

serve(load)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The adapter; its process goes on from test to test, as it does from window to window."""
    path = tmp_path_factory.mktemp("peer") / "adapter.py"
    path.write_text(ADAPTER)
    yield path
    outside.close_all()


@pytest.fixture
def config() -> Any:
    fields = {
        "rope_parameters": {"rope_theta": 5000.0},
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "name_or_path": "some/folder",
    }
    found = SimpleNamespace(**fields)
    found.get_text_config = lambda decoder: found
    return found


@pytest.fixture
def cache(make_cache: Callable[..., Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.DynamicCache(make_cache(dtype=torch.bfloat16))


def test_a_peer_gives_back_what_its_process_wrote(script: Path, config: Any, cache: Any) -> None:
    outside.close_all()
    peer = Outside(script, "doubles", HERE)
    first, second = peer(cache, config), peer(cache, config)
    for index, layer in enumerate(cache.layers):
        assert torch.equal(first.cache.layers[index].keys, layer.keys * 2)
        assert torch.equal(first.cache.layers[index].values, layer.values + 1)
        assert torch.equal(second.cache.layers[index].values, layer.values + 2)  # the same process, asked again
    assert (first.nbytes, first.payload_nbytes, first.profile_nbytes) == (100, 60, 0)
    assert (first.save_s, first.restore_s, first.kept, first.logits) == (0.5, None, 1.0, None)
    assert first.note.startswith("{'rope_theta': 5000.0, 'head_dim': 16, 'folder': 'some/folder'}")
    assert first.note == second.note


@pytest.mark.parametrize(
    ("peer", "problem"),
    [
        ("fails", "adapter.py: ValueError: no such codebook"),
        ("dies", "adapter.py ended with exit code 7: out of memory"),
        ("narrower", r"gave \(2, 40, 15\) torch.bfloat16 for k0; expected \(2, 40, 16\) torch.bfloat16"),
        ("widens", r"gave \(2, 40, 16\) torch.float64 for k0"),
        ("forgets", "gave nothing for k2"),
        ("silent", "left no readable tensors"),
    ],
)
def test_a_broken_peer_is_named_and_can_be_asked_again(
    script: Path, config: Any, cache: Any, peer: str, problem: str
) -> None:
    with pytest.raises(KVCellarError, match=problem):
        Outside(script, peer, HERE)(cache, config)
    assert Outside(script, "doubles", HERE)(cache, config).nbytes == 100


@pytest.mark.parametrize(
    "said",
    [
        {"nbytes": 0},
        {"nbytes": 1.5},
        {"nbytes": None},
        {"nbytes": True},
        {"payload_nbytes": -1},
        {"payload_tokens": 3.5},
        {"save_s": "fast"},
        {"save_s": float("nan")},
        {"kept": 0},
        {"kept": 1.5},
    ],
)
def test_figures_that_cannot_be_are_refused(script: Path, config: Any, cache: Any, said: dict[str, Any]) -> None:
    (name,) = said
    with pytest.raises(KVCellarError, match=f"for {name}; expected"):
        Outside(script, "doubles", HERE, {"said": said})(cache, config)


def test_a_peer_that_runs_the_model_gives_logits(script: Path, config: Any, cache: Any) -> None:
    peer = Outside(script, "reads", HERE, {"said": {"kept": 0.5}}, runs_model=True, gives_cache=False)
    coded = peer(cache, config, tokens=TOKENS, following=FOLLOWING)
    assert coded.logits is not None
    assert torch.equal(coded.logits, torch.full((2, VOCABULARY), float(sum(TOKENS) + 3)))
    assert (coded.cache, coded.kept) == (None, 0.5)


@pytest.mark.parametrize("following", [None, FOLLOWING])
def test_kept_tokens_become_a_cache_that_stands_for_all(
    script: Path, config: Any, cache: Any, following: list[int] | None
) -> None:
    coded = Outside(script, "reads", HERE, {"keeps": True}, runs_model=True)(
        cache, config, tokens=TOKENS, following=following
    )
    assert torch.equal(coded.cache.layers[1].keys, cache.layers[1].keys[:, :, ::2])
    assert coded.cache.get_seq_length() == len(TOKENS)
    assert (coded.logits is None) == (following is None)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"keeps": False}, "kept nothing of k0"),
        ({"keeps": True, "step": 4}, r"kept \(2, 10, 16\) of v0; expected as many tokens of \(2, 40, 16\) everywhere"),
        ({"keeps": True, "short": 1}, r"logits \(1, 11\); expected \(2, 11\)"),
    ],
)
def test_kept_tokens_and_logits_of_another_shape_are_refused(
    script: Path, config: Any, cache: Any, options: dict[str, Any], problem: str
) -> None:
    peer = Outside(script, "reads", HERE, options, runs_model=True)
    with pytest.raises(KVCellarError, match=problem):
        peer(cache, config, tokens=TOKENS, following=FOLLOWING)


def test_a_peer_that_runs_the_model_needs_the_window(script: Path, config: Any, cache: Any) -> None:
    with pytest.raises(InvalidInput, match="needs the tokens"):
        Outside(script, "reads", HERE, runs_model=True)(cache, config)
    with pytest.raises(InvalidInput, match="needs a continuation"):
        Outside(script, "reads", HERE, runs_model=True, gives_cache=False)(cache, config, tokens=TOKENS)


def test_a_peer_is_given_the_window_by_name(
    script: Path, config: Any, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PEERS, "reader", Outside(script, "reads", HERE, runs_model=True, gives_cache=False))
    coded = coded_by("reader", cache, config, tokens=TOKENS, following=FOLLOWING)
    assert coded.logits is not None
    assert coded_by("zstd-3", cache, config, tokens=TOKENS, following=FOLLOWING).logits is None
    assert [gives_cache(name) for name in ("reader", "zstd-3", "cachegen")] == [False, True, True]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import no_such_package", "ended with exit code 1: ModuleNotFoundError: No module named 'no_such_package'"),
        ("print('Welcome!')", "answered 'Welcome!.n'; expected one JSON object a line"),
        (
            "from kvcellar.frontends.bench.outside_peers.serve import serve\nserve(lambda: 1 / 0)",
            "broken.py: ZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_script_that_does_not_start_says_why(
    tmp_path: Path, config: Any, cache: Any, code: str, problem: str
) -> None:
    script = tmp_path / "broken.py"
    script.write_text(code)
    for _ in range(2):  # and is not taken for a running one afterwards
        with pytest.raises(KVCellarError, match=problem):
            Outside(script, "any", HERE)(cache, config)


@pytest.mark.parametrize("name", sorted(name for name in OUTSIDE if OUTSIDE[name].environment.name))
def test_a_missing_environment_is_named(
    config: Any, cache: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    assert OUTSIDE[name].script.is_file()
    with pytest.raises(MissingExtra, match="is not there; `make peers` makes it"):
        coded_by(name, cache, config, tokens=TOKENS, following=FOLLOWING)


def test_the_baseline_is_missing_away_from_the_source(
    config: Any, cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingExtra, match="is not here; it is part of kvcellar's source"):
        coded_by("kvtc", cache, config, tokens=TOKENS)


def test_an_environment_of_other_packages_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    made = Environment("codecs")
    made.folder.mkdir(parents=True)
    (made.folder / MARK).write_text(made.wanted)
    made.require()
    (made.folder / MARK).write_text(made.wanted + "one-more==1.0\n")
    with pytest.raises(MissingExtra, match="is made of other packages"):
        made.require()


def test_packages_of_an_environment_come_before_those_here(
    tmp_path: Path, config: Any, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    made = Environment("codecs")
    made.folder.mkdir(parents=True)
    (made.folder / MARK).write_text(made.wanted)
    (made.folder / "package_of_the_peer.py").write_text("NUMBER = 4711\n")
    script = tmp_path / "counting.py"
    script.write_text(f"from package_of_the_peer import NUMBER\n{ADAPTER}".replace("answer(100,", "answer(NUMBER,"))
    assert Outside(script, "doubles", made)(cache, config).nbytes == 4711


@pytest.mark.parametrize("environment", environments.ENVIRONMENTS, ids=lambda environment: environment.name)
def test_environments_are_pinned_and_bring_no_torch(environment: Environment) -> None:
    lines = (LISTS / f"{environment.name}.txt").read_text().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert packages
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", package) for package in packages)
    assert not [package for package in packages if re.match("torch==|nvidia|triton|cuda|cupy", package)]


class _Pip:
    """Stands for pip: makes the folder it is told to, or fails for one environment; counts its calls."""

    def __init__(self, failing: str = ""):
        self.failing, self.calls = failing, 0

    def __call__(self, command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        target, listed = (Path(command[command.index(option) + 1]) for option in ("--target", "--requirement"))
        target.mkdir()
        (target / "package.py").write_text(listed.name)
        failed = listed.stem == self.failing
        errors = "WARNING: slow\nERROR: No matching distribution found for x==1\n" if failed else ""
        return subprocess.CompletedProcess(command, int(failed), stderr=errors)


def test_one_failure_leaves_the_other_environments_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    monkeypatch.setattr(environments.subprocess, "run", _Pip(failing="lmcache"))
    assert environments.main() == 1
    assert "lmcache: failed: ERROR: No matching distribution found for x==1\n" in capsys.readouterr().err
    assert [environment.current for environment in environments.ENVIRONMENTS] == [True, False, True]
    assert sorted(path.name for path in (tmp_path / "peers").iterdir()) == ["codecs", "kvpress"]

    again = _Pip()
    monkeypatch.setattr(environments.subprocess, "run", again)
    assert environments.main() == 0
    assert again.calls == 1  # only the one that failed
    assert all(environment.current for environment in environments.ENVIRONMENTS)


def test_an_environment_that_cannot_be_renewed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    monkeypatch.setattr(environments.subprocess, "run", _Pip())
    made = Environment("codecs")
    made.make()
    monkeypatch.setattr(environments.subprocess, "run", _Pip(failing="codecs"))
    with pytest.raises(StorageError, match="No matching distribution"):
        made.make()
    assert made.current


def test_answers_are_json_lines_alone(script: Path) -> None:
    """Whatever libraries print while loading goes to standard error."""
    done = subprocess.run([sys.executable, script], input="", capture_output=True, text=True, timeout=60)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"ready": True, "versions": {}}]
    assert "a library's greeting" in done.stderr
    assert "from a child process" in done.stderr
