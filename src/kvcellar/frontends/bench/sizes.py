"""Where the bytes of an archive go, read off its records, so that nothing is forgotten and nothing counted twice."""

from __future__ import annotations

from pathlib import Path

from ...archive.commit import records
from ...archive.format import BLOCK, COMMIT, HEADER_SIZE, INDEX, MANIFEST, PROFILE
from ...archive.reader import ArchiveReader
from ...decode import stored_symbols
from ...pipeline import Pipeline
from ...profile import Profile
from ...stages import Grade
from ...store.local import LocalStore

PARTS = ("header", "manifest", "profile", "block_heads", "token_ids", "payload", "index", "commits", "dead")
_WHOLE_RECORDS = {MANIFEST: "manifest", PROFILE: "profile", INDEX: "index", COMMIT: "commits"}


def bytes_by_part(path: Path) -> dict[str, int]:
    """Bytes of each of `PARTS` in the archive at `path`; they add up to the file's size.

    A record's frame and checksums count with it: `block_heads` is everything of a block but its packed `token_ids`
    and its `payload`, the parts that code its tokens. `dead` are blocks that later ones replaced, and what is no
    record. Raises what opening an archive raises.
    """
    found = dict.fromkeys(PARTS, 0)
    store, name = LocalStore.at(path)
    with ArchiveReader(store.open_reader(name)) as archive:
        live = {int(entry["offset"]): index for index, entry in enumerate(archive.entries)}
        size = archive.reader.size()
        found["header"] = HEADER_SIZE
        for tag, start, stop in records(archive.reader, HEADER_SIZE, size):
            if tag in _WHOLE_RECORDS:
                found[_WHOLE_RECORDS[tag]] += stop - start
            elif tag == BLOCK and start in live:
                head = archive.block(live[start]).head
                found["token_ids"] += head.id_bytes
                found["payload"] += head.body_length
                found["block_heads"] += stop - start - head.id_bytes - head.body_length
    found["dead"] = size - sum(found.values())
    return found


def coarse_bytes(path: Path, profile: Profile | None, pipeline: Pipeline | None = None) -> tuple[int, int]:
    """Bytes that code the coarse tokens of the archive at `path`, their ids included, and how many tokens these are.

    A part holds symbols of both grades: those of its coarse tokens are read and coded again by themselves. Of a block's
    packed ids each token takes the same share. Without a fine window every token is coarse. `pipeline` is that of the
    archive where it is ready already.
    """
    store, name = LocalStore.at(path)
    size = tokens = 0
    with ArchiveReader(store.open_reader(name)) as archive:
        pipeline = pipeline or Pipeline(archive.manifest.recipe, archive.manifest.geometry, profile)
        for block in archive.blocks(0, archive.tokens):
            head, count = block.head, len(block.head.coarse_tokens)
            if head.all_coarse:
                size += head.body_length
            elif count:
                symbols = stored_symbols(pipeline, archive, head.start, block.stop)
                size += sum(map(len, pipeline.pack([symbols.arrays[Grade.COARSE]])))
            size += -(-head.id_bytes * count // head.count)
            tokens += count
    return size, tokens
