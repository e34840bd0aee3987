"""Stages that installed packages offer by entry point (docs/adding-a-stage.md)."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable
from functools import lru_cache

from .errors import InvalidRecipe

ENTRY_POINTS = "kvcellar.stages"


def installed(kind: str) -> dict[str, list[importlib.metadata.EntryPoint]]:
    """Stages of `kind` that installed packages offer, by id: entry points ``kind:id`` of the group `ENTRY_POINTS`.

    A recipe may come out of a file that nobody trusts, so its ids are only compared with the names listed here and
    never imported, joined to a path or searched for anywhere else: the most a file can do is choose among packages
    that whoever runs this has installed. The folder one happens to be in is left out, because a download may lie
    there, beside its own metadata.
    """
    here = os.path.realpath(os.getcwd())
    folders = tuple(entry for entry in sys.path if entry and os.path.realpath(entry) != here)
    return _offered(kind, folders, tuple(map(_changed, folders)))


def _changed(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


@lru_cache(64)  # the look takes most of a second, and a hostile file could ask for it again and again
def _offered(
    kind: str, folders: tuple[str, ...], changed: tuple[int, ...]
) -> dict[str, list[importlib.metadata.EntryPoint]]:
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    packages = set()
    for package in importlib.metadata.distributions(path=list(folders)):
        try:
            name, points = package.name, package.entry_points.select(group=ENTRY_POINTS)
        except Exception:  # a package whose metadata cannot be read offers nothing, and must not hinder others
            continue
        if name in packages:  # behind another of its name, as a module of that name would be
            continue
        packages.add(name)
        for point in points:
            its_kind, _, stage_id = point.name.partition(":")
            if its_kind == kind and stage_id:
                found.setdefault(stage_id, []).append(point)
    return found


def load(kind: str, stage_id: str, base: type | None, shipped: Iterable[str]) -> type:
    """The installed stage class with this id, a subclass of `base`; `shipped` are the ids that need no package.

    Raises InvalidRecipe unless there is just one and it is one.
    """
    offered = installed(kind)
    points = offered.get(stage_id, [])
    what = f"{kind} stage {stage_id[:80]!r}"
    if not points:
        known = sorted({*shipped, *offered})
        raise InvalidRecipe(f"unknown {what}; known: {', '.join(known) or 'none'}")
    if len(points) > 1:
        packages = ", ".join(sorted(point.dist.name if point.dist else "?" for point in points))
        raise InvalidRecipe(f"{what} is offered by more than one package: {packages}")
    origin = f"{what}, installed as {points[0].value}"
    try:
        stage = points[0].load()
    except Exception as error:  # whatever a package does when it is imported
        raise InvalidRecipe(f"{origin}, cannot be loaded: {said(error)}") from error
    if base is None or not isinstance(stage, type) or not issubclass(stage, base):
        raise InvalidRecipe(f"{origin}, is no {base.__name__ if base else 'stage that recipes can use yet'}")
    if getattr(stage, "id", None) != stage_id:
        raise InvalidRecipe(f"{origin}, calls itself {getattr(stage, 'id', None)!r}")
    return stage


def said(error: Exception) -> str:
    """What goes into a message of an error that another package raised."""
    return f"{type(error).__name__}: {error}"
