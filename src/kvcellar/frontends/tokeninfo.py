"""What a token log says of itself. No torch: `kvcellar info` and `kvcellar verify` need none."""

from __future__ import annotations

from typing import Any

from ..archive.info import ArchiveInfo, VerifyReport
from ..errors import DamagedArchive
from ..language.tokenlog import VERSION, TokenLog, is_token_log
from ..store.base import Reader


def describe_log(log: TokenLog, path: str, size: int) -> ArchiveInfo:
    """Facts about a log of `size` bytes; raw bytes and ratios are those of the cache that a replay computes."""
    tokens, geometry = log.tokens, log.geometry
    return ArchiveInfo(
        path=path,
        format=f"token log {VERSION}",
        recipe=log.recipe.name,
        recipe_json=log.recipe.to_json(),
        identity=log.identity.to_json(),
        namespace=log.namespace,
        tokens=tokens,
        next_position=tokens,
        layers=len(geometry),
        geometry=geometry.to_json(),
        blocks=len(log.blocks),
        sealed_blocks=len(log.blocks),
        commits=len(log.segments),
        file_bytes=size,
        live_bytes=size,
        bytes_per_token=size / tokens,
        raw_bytes=tokens * geometry.bytes_per_token,
        raw_bytes_per_token=geometry.bytes_per_token,
        ratio_raw=tokens * geometry.bytes_per_token / size,
        ratio_16bit=tokens * geometry.bytes_per_token_16bit / size,
        profile=None,
        profile_bytes=0,
    )


def streams_of(log: TokenLog) -> dict[str, int]:
    """Bytes of each stream of ids, by how it is coded."""
    found = {"model-free": log.ids, "under the model": log.coded}
    return {name: len(stream) for name, stream in found.items() if stream is not None}


def log_facts(log: TokenLog) -> dict[str, Any]:
    """What `info` tells programs of a log beyond `describe_log`."""
    return {
        "ids_bytes": None if log.ids is None else len(log.ids),
        "coded_bytes": None if log.coded is None else len(log.coded),
        "runtime": None if log.coded is None else log.runtime.hex(),
        "segments": [segment._asdict() for segment in log.segments],
        "checked_block": log.block,
    }


def verify_log(log: TokenLog, path: str, size: int) -> VerifyReport:
    """Decode the ids that need no model; the checksum of the whole file was compared when it was read."""
    problems: tuple[tuple[str, str], ...] = ()
    if log.ids is not None:
        try:
            log.token_ids()
        except DamagedArchive as damage:
            problems = ((damage.part, damage.problem),)
    return VerifyReport(path, log.tokens, len(log.blocks), size, problems)


def is_log(reader: Reader) -> bool:
    """Whether an open file is a token log."""
    return is_token_log(reader.read(0, 4))
