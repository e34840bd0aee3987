"""Writing an archive: a new file at once, more blocks behind an old one, or the same state without its dead bytes.

Order makes it safe: blocks first, synced, then the commit, synced. Until the commit is whole, readers see the
commit before it.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from ..errors import StorageError
from ..store.base import Appender, Pending
from .block import BlockHead
from .commit import ENTRY, Commit, pack_index
from .format import BLOCK, HEADER_SIZE, MANIFEST, PROFILE, REDUCED, checksum, pack_header, pack_record
from .manifest import Manifest
from .reader import ArchiveReader

# Opening walks the commits since the nearest index: at most so many, or a fraction of the blocks, which keeps what
# indexes add to a commit constant.
INDEX_EVERY = 64
BLOCKS_PER_COMMIT_WALKED = 16


@dataclass(frozen=True)
class NewBlock:
    """A block to write: its head, whose part table describes `parts`; the writer empties the list."""

    head: BlockHead
    parts: list[bytes] | list[memoryview]


def write_archive(
    pending: Pending,
    manifest: Manifest,
    blocks: Iterable[NewBlock],
    profile: bytes | None = None,
    next_position: int | None = None,
) -> None:
    """Everything from header to commit. The same blocks give the same bytes, however they came to be.

    `next_position` is that of the token to come; default: the one behind the last block's.
    """
    pending.append(pack_header(REDUCED if manifest.recipe.reduce is not None else 0))
    pending.append(pack_record(MANIFEST, HEADER_SIZE, manifest.pack(), 0))
    if profile is not None:
        offset, head = pending.size(), struct.pack("<Q", checksum(profile))
        pending.append(pack_record(PROFILE, offset, head, len(profile)) + profile)
    entries, following, tokens = [], 0, 0
    for block in blocks:
        entries.append(_append_block(pending.append, pending.size(), block))
        tokens = block.head.start + block.head.count
        following = block.head.first_position + block.head.count
    next_position = following if next_position is None else next_position
    index_offset = pending.size()
    state = np.array(entries, ENTRY)
    pending.append(pack_index(index_offset, state))
    offset = pending.size()
    commit = Commit(1, offset, 0, index_offset, len(state), tokens, next_position, 0, np.empty(0, ENTRY))
    live = offset + commit.packed_length
    pending.append(replace(commit, live=live).pack())


def append_blocks(appender: Appender, archive: ArchiveReader, keep: int, blocks: Iterable[NewBlock]) -> None:
    """Commit `archive` with its blocks from `keep` on replaced by `blocks`, then make that its state.

    When anything fails, the file is cut back to the commit before and the error goes on.
    """
    if not appender.is_current():
        raise StorageError(errno.ESTALE, f"{appender.name} was replaced while it was open: open it again to append")
    end = archive.commit.end
    if appender.size() != end:
        appender.truncate(end)  # what an earlier writer left unfinished
    try:
        commit, state = _append_commit(appender, archive, keep, blocks)
    except BaseException:
        with suppress(StorageError):
            appender.truncate(end)
        raise
    archive.advance(commit, state)


def _append_commit(
    appender: Appender, archive: ArchiveReader, keep: int, blocks: Iterable[NewBlock]
) -> tuple[Commit, np.ndarray]:
    """Write blocks and commit; returns the commit and its live blocks."""
    last, end = archive.commit, archive.commit.end
    entries, tokens = [], last.tokens
    for block in blocks:
        entries.append(_append_block(appender.append, end, block))
        end += int(entries[-1][1])
        tokens = block.head.start + block.head.count
    next_position = last.next_position + tokens - last.tokens
    added = np.array(entries, ENTRY)
    state = np.concatenate([archive.entries[:keep], added])
    index_offset = 0
    if archive.since_index + 1 >= max(INDEX_EVERY, len(state) // BLOCKS_PER_COMMIT_WALKED):
        index = pack_index(end, state)
        appender.append(index)
        index_offset, end = end, end + len(index)
    appender.sync()
    commit = Commit(
        sequence=last.sequence + 1,
        offset=end,
        previous=last.offset,
        index=index_offset,
        keep=keep,
        tokens=tokens,
        next_position=next_position,
        live=0,
        added=added,
    )
    live = archive.first_block + int(state["length"].sum()) + len(pack_index(0, state[:0])) + state.nbytes
    commit = replace(commit, live=live + commit.packed_length, end=end + commit.packed_length)
    appender.append(commit.pack())
    appender.sync()
    return commit, state


def _append_block(append: Callable[[bytes | memoryview], None], offset: int, block: NewBlock) -> tuple[int, ...]:
    """Write one block at `offset`; returns its index entry."""
    head = block.head.pack()
    record = pack_record(BLOCK, offset, head, block.head.body_length)
    append(record)
    for part in block.parts:
        append(part)
    block.parts.clear()  # or they would live on while the next block is made
    length = len(record) + block.head.body_length
    return (offset, length, block.head.start, block.head.count, int(block.head.sealed), checksum(head))
