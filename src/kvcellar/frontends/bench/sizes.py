"""Where the bytes of an archive go, read off its records, so that nothing is forgotten and nothing counted twice."""

from __future__ import annotations

from pathlib import Path

from ...archive.commit import records
from ...archive.format import BLOCK, COMMIT, HEADER_SIZE, INDEX, MANIFEST, PROFILE
from ...archive.reader import ArchiveReader
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
