"""`kvcellar info`: reads header, manifest and last commit; loads neither torch nor transformers."""

from __future__ import annotations

import click

from ...archive.info import ArchiveInfo, coarse_bytes_per_token, describe
from ...archive.reader import ArchiveReader
from ...language.tokenlog import TokenLog
from ...recipe import STAGES
from ...store.local import LocalStore
from ..curve import Spent, spent
from ..tokeninfo import describe_log, is_log, log_facts
from .common import emit, facts, human_bytes, json_option, namespace_option


@click.command("info")
@click.argument("file", type=click.Path(dir_okay=False))
@namespace_option
@json_option
def command(file: str, namespace: str, as_json: bool) -> None:
    """Show what the archive FILE holds and how large it is.

    Sizes are bytes on disk. "16-bit" compares the whole file with the same cache in a 16-bit dtype. "text" compares the
    bytes of coarse tokens with those of the text that the profile's curve was measured on: far more of them mean that
    the text lies far from what the profile was made from.
    """
    store, name = LocalStore.at(file)
    with store.open_reader(name) as handle:
        if is_log(handle):
            from .tokens import log_summary

            log = TokenLog.read(handle, namespace)
            about = describe_log(log, handle.name, handle.size())
            emit({**about.to_json(), **log_facts(log)}, log_summary(log, about), as_json=as_json)
            return
        archive = ArchiveReader(handle, namespace)
        info, coarse = describe(archive), coarse_bytes_per_token(archive)
        compared = spent(archive.manifest.recipe, archive.manifest.profile, coarse)
    facts_for_programs = {
        **info.to_json(),
        "coarse_bytes_per_token": coarse,
        "usual_coarse_bytes_per_token": compared.usual if compared else None,
        "far_from_calibration": compared.far if compared else None,
    }
    emit(facts_for_programs, summary(info, compared), as_json=as_json)


def summary(info: ArchiveInfo, compared: Spent | None = None) -> list[str]:
    """The lines a person reads."""
    rows = {
        "archive": info.path,
        "format": f"kvc {info.format}, {info.commits} commit{'s' * (info.commits > 1)}",
        "recipe": info.recipe,
        "stages": _stages(info.recipe_json),
        "model": f"{info.identity['label']} ({info.identity['kind']} {info.identity['digest'][:12]})",
        "tokens": f"{info.tokens:,} in {info.blocks} blocks ({info.sealed_blocks} sealed)",
        "layers": "; ".join(_layers(run) for run in info.geometry),
        "file": f"{human_bytes(info.file_bytes)} = {info.bytes_per_token:,.0f} B/token",
        "raw cache": f"{human_bytes(info.raw_bytes)} = {info.raw_bytes_per_token:,} B/token",
        "ratio": f"{info.ratio_raw:.2f} x raw, {info.ratio_16bit:.2f} x 16-bit",
        "profile": _profile(info),
    }
    if info.slots_per_head is not None:
        share = info.slots_per_head / info.tokens
        rows["slots"] = f"{info.slots_per_head:,.1f} a head, {share:.1%} of the tokens ({info.slots:,} in all): reduced"
    if compared is not None:
        rows["text"] = _compared(compared)
    dead = info.file_bytes - info.live_bytes - info.uncommitted_bytes
    if dead:
        rows["dead"] = (
            f"{human_bytes(dead)} of the file are superseded; appending reclaims them once they outweigh the rest"
        )
    if info.namespace:
        rows["namespace"] = info.namespace
    if info.uncommitted_bytes:
        rows["unfinished"] = f"{info.uncommitted_bytes:,} bytes follow the last commit: a write stopped half-way"
    return facts(rows)


def _stages(recipe: dict) -> str:  # type: ignore[type-arg]
    """Stage ids with their settings, which say how layers differ, and the fine window."""
    named = [recipe[kind] for kind in STAGES if recipe[kind] is not None]
    stages = ["".join([s["id"], *(f", {key} {value}" for key, value in s.items() if key != "id")]) for s in named]
    if (window := recipe["window"]) is not None:
        stages.append(f"{window['sinks']} sinks and {window['recent']} recent tokens fine")
    return "; ".join(stages)


def _layers(run: dict) -> str:  # type: ignore[type-arg]
    key, value = run["key"], run["value"]
    same = key == value
    sides = f"{key['heads']} KV heads x {key['width']} {key['dtype']}"
    return f"{run['layers']} x ({sides}{'' if same else ' keys, ' + str(value) + ' values'})"


def _compared(found: Spent) -> str:
    sizes = f"{found.text:,.1f} B per coarse token, text like the profile's {found.usual:,.1f}"
    if not found.far:
        return f"{sizes} ({found.text / found.usual:.2f} x)"
    return (
        f"{sizes} ({found.text / found.usual:.2f} x): it lies far from the calibration text, which costs bytes and "
        "some quality; calibrate with --text of its kind"
    )


def _profile(info: ArchiveInfo) -> str:
    if info.profile is None:
        return "none needed"
    size = "not in this file" if info.profile_bytes is None else f"{human_bytes(info.profile_bytes)}, in this file"
    return f"{info.profile[:12]} ({size})"
