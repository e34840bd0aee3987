"""Ways to damage an archive: blindly, or with every checksum and offset set right afterwards.

`mutated` is a pure function of the archives and a random generator, so an input is known by its seed and number.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable

from fuzzrecords import Rec, put_together, taken_apart
from kvcellar.archive.format import BLOCK, COMMIT, END_MAGIC, HEADER_SIZE, INDEX, MAGIC, MANIFEST, checksum

EXTREMES = [0, 1, 2, 7, 8, 9, 15, 16, 17, 127, 128, 255, 256, 511, 65535, 65536, 65537, 1 << 24, (1 << 24) + 1]
EXTREMES += [(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
# Offset and width of the integers of a block's head and of a commit (docs/format.md §4 and §6).
BLOCK_FIELDS = [(0, 1), (1, 1), (2, 1), (3, 1), (4, 4), (8, 8), (16, 8), (24, 4), (28, 4)]
COMMIT_FIELDS = [(at, 8) for at in range(0, 64, 8)]
ENTRY_FIELDS = [(0, 8), (8, 8), (16, 8), (24, 4), (28, 4), (32, 8)]
STRANGE = [None, True, False, 0, -1, 1, 1.0, 1e308, 1 << 63, 10**30, "", "x", "x" * 5000, "\ud800", "é", [], {}, [[]]]
STRANGE += [["float16"], {"id": "byteplanes-zstd/1"}, {"id": "nobody/1"}, "float32", "bfloat16", 2, 3, 8, 65535, 65536]


# --- blind damage: the checksums stay as they were


def blind(rng: random.Random, data: bytes, other: bytes) -> tuple[str, bytes]:
    """One of the ways in which disks, networks and people spoil a file."""
    out, at = bytearray(data), rng.randrange(len(data))
    length = rng.choice([1, 2, 8, 16, 40, 100, rng.randrange(1, len(data))])
    kind = rng.choice(["flip", "flips", "run", "cut", "grow", "drop", "double", "splice", "splice at a record", "swap"])
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else rng.randrange(2, 9)):
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    elif kind == "run":
        fill = rng.choice([bytes(length), b"\xff" * length, rng.randbytes(length)])
        out[at : at + length] = fill[: len(out) - at]
    elif kind == "cut":
        del out[at:]
    elif kind == "grow":
        out += rng.choice([bytes(length), rng.randbytes(length), END_MAGIC, data[at:], other[HEADER_SIZE:], MAGIC])
    elif kind == "drop":
        del out[at : at + length]
    elif kind == "double":
        out[at:at] = data[at : at + length]
    elif kind == "splice":
        out[at:] = other[rng.choice([at, rng.randrange(len(other))]) :]
    elif kind == "splice at a record":
        here, there = (rng.choice(taken_apart(each)).offset for each in (data, other))
        out[here:] = other[there:]
    else:
        to = rng.randrange(len(data))
        out[at : at + length], out[to : to + length] = data[to : to + length], data[at : at + length]
    return kind, bytes(out)


# --- damage with right checksums: what a person could write who wants to mislead


def forged(rng: random.Random, data: bytes, other: bytes) -> tuple[str, bytes]:
    """One to three lies in records whose checksums are right."""
    records, kinds = taken_apart(data), []
    late: list[Callable[[list[Rec]], object]] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        kind = rng.choice(list(FORGERIES))
        kinds.append(kind)
        FORGERIES[kind](rng, records, other, late)
    made = put_together(records, lambda held: [change(held) for change in late], follow=rng.random() < 0.7)
    if rng.random() < 0.02:
        kinds.append("header")
        fields = [1, 0, 0, 0]
        fields[rng.randrange(4)] = rng.choice(EXTREMES)
        head = struct.pack("<8sHHIQ", MAGIC, fields[0] & 0xFFFF, fields[1] & 0xFFFF, fields[2] & 0xFFFFFFFF, fields[3])
        made = head + struct.pack("<Q", checksum(head)) + made[HEADER_SIZE:]
    return "+".join(kinds), made


def _integer(rng: random.Random, data: bytearray, at: int, width: int) -> None:
    old = int.from_bytes(data[at : at + width], "little")
    value = rng.choice(
        [rng.choice(EXTREMES), old + 1, old - 1, old ^ 1 << rng.randrange(8 * width), rng.getrandbits(64)]
    )
    data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")


def _bytes(rng: random.Random, data: bytearray) -> None:
    """Change some bytes, or their number."""
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(6)
    if kind == 0 and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 1 and data:
        data[at % len(data)] = rng.randrange(256)
    elif kind == 2 and len(data) > 8:
        _integer(rng, data, rng.randrange(len(data) - 8), rng.choice([1, 2, 4, 8]))
    elif kind == 3:
        del data[at : at + rng.choice([1, 2, 8, 40, 1000])]
    elif kind == 4:
        data[at:at] = rng.randbytes(rng.choice([1, 2, 8, 40, 1000]))
    elif kind == 5:
        data[at : at + 8] = rng.choice([b"\0", b"\xff", b"\1"]) * len(data[at : at + 8])


def _one(rng: random.Random, records: list[Rec], tag: bytes) -> Rec | None:
    return rng.choice([record for record in records if record.tag == tag] or [None])


def _part(rng: random.Random, records: list[Rec], other: bytes, late: list) -> None:
    """Other bytes in a part: of a stream's head, of its planes, or in the middle of a zstd frame."""
    block = _one(rng, records, BLOCK)
    if block is None or len(block.head) < 48:
        return
    groups = struct.unpack_from("<I", block.head, 24)[0]
    table = len(block.head) - 16 * groups
    if not 0 < groups < 100 or table < 32:
        return
    lengths = [struct.unpack_from("<Q", block.head, table + 16 * g)[0] for g in range(groups)]
    if sum(lengths) != len(block.body):
        return
    group = rng.randrange(groups)
    start = sum(lengths[:group])
    part = block.body[start : start + lengths[group]]
    frame = bytes(part).find(b"\x28\xb5\x2f\xfd", rng.randrange(len(part) + 1))
    for _ in range(rng.choice([1, 1, 2, 4])):
        if rng.random() < 0.3 and len(part) > 24:
            part[rng.randrange(24)] = rng.choice([0, 1, 2, 3, 255, rng.randrange(256)])
        elif frame >= 0 and len(part) > frame + 20 and rng.random() < 0.6:
            part[frame + rng.randrange(4, 20)] ^= 1 << rng.randrange(8)
        else:
            _bytes(rng, part)
    block.body[start : start + lengths[group]] = part
    struct.pack_into("<QQ", block.head, table + 16 * group, len(part), checksum(bytes(part)))


def _block_head(rng: random.Random, records: list[Rec], other: bytes, late: list) -> None:
    block = _one(rng, records, BLOCK)
    if block is None:
        return
    if rng.random() < 0.6 and len(block.head) >= 32:
        _integer(rng, block.head, *rng.choice(BLOCK_FIELDS))
    else:
        _bytes(rng, block.head)


def _manifest(rng: random.Random, records: list[Rec], other: bytes, late: list) -> None:
    """Another value somewhere in the JSON, a key more or less, or other bytes."""
    manifest = _one(rng, records, MANIFEST)
    if manifest is None or rng.random() < 0.15:
        return _bytes(rng, manifest.head) if manifest else None
    try:
        tree = json.loads(manifest.head)
    except (ValueError, RecursionError):  # an earlier change
        return None
    node = tree
    while isinstance(node, (dict, list)) and node:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not isinstance(node[key], (dict, list)) or not node[key] or rng.random() < 0.3:
            break
        node = node[key]
    if isinstance(node, (dict, list)) and node:
        _other_value(rng, node, key)
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    if rng.random() < 0.05:
        text = text.replace("{", '{"recipe":1,', 1)
    depth = rng.choice([10, 31, 33, 500, 990, 5000])
    text = text.replace('"NESTED"', "[" * depth + "]" * depth).replace("Infinity", "NaN")
    manifest.head[:] = text.encode()
    return None


def _other_value(rng: random.Random, node: dict | list, key: object) -> None:
    kind = rng.randrange(5)
    if kind == 0:
        del node[key]  # type: ignore[arg-type]
    elif kind == 1 and isinstance(node, dict):
        node["more"] = rng.choice(STRANGE)
    elif kind == 2 and isinstance(node[key], int):  # type: ignore[index]
        node[key] = rng.choice([node[key] + 1, node[key] - 1, *EXTREMES])  # type: ignore[index]
    elif kind == 3 and isinstance(node, list):
        node += [node[0]] * rng.choice([1, 2, 5000])
    else:
        node[key] = rng.choice([*STRANGE, "NESTED", float("inf")])  # type: ignore[index]


def _late(tag: bytes) -> Callable[[random.Random, list[Rec], bytes, list], None]:
    """An integer of an index or a commit, once everything else points where it should."""

    def forge(rng: random.Random, records: list[Rec], other: bytes, late: list) -> None:
        def change(held: list[Rec]) -> None:
            record = _one(rng, held, tag)
            if record is None:
                return
            data = record.body if tag == INDEX else record.head
            entries = (len(data) - (0 if tag == INDEX else 64)) // 40
            if tag == INDEX and rng.random() < 0.2:
                _integer(rng, record.head, 0, 8)
            elif entries > 0 and (tag == INDEX or rng.random() < 0.4):
                at, width = rng.choice(ENTRY_FIELDS)
                _integer(rng, data, (0 if tag == INDEX else 64) + 40 * rng.randrange(entries) + at, width)
            elif len(data) >= 64 and tag == COMMIT:
                _integer(rng, data, *rng.choice(COMMIT_FIELDS))
            else:
                _bytes(rng, data)

        late.append(change)

    return forge


def _frame(rng: random.Random, records: list[Rec], other: bytes, late: list) -> None:
    field = rng.choice(
        [(0, 4, rng.getrandbits(32)), (4, 4, 1), (8, 8, rng.choice(EXTREMES)), (16, 8, rng.choice(EXTREMES))]
    )
    rng.choice(records).frame = (field,)


def _records(rng: random.Random, records: list[Rec], other: bytes, late: list) -> None:
    """Records that are missing, there twice, in another order, or from another archive."""
    i, j = rng.randrange(len(records)), rng.randrange(len(records))
    kind = rng.randrange(4)
    if kind == 0 and len(records) > 1:
        del records[i]
    elif kind == 1:
        records.insert(j, records[i].copy())
    elif kind == 2:
        records[i], records[j] = records[j], records[i]
    else:
        records.insert(j, rng.choice(taken_apart(other)))


FORGERIES: dict[str, Callable[[random.Random, list[Rec], bytes, list], object]] = {
    "part": _part,
    "block head": _block_head,
    "manifest": _manifest,
    "index": _late(INDEX),
    "commit": _late(COMMIT),
    "frame": _frame,
    "records": _records,
}


def mutated(rng: random.Random, data: bytes, other: bytes) -> tuple[str, bytes]:
    """What was done, and the result; blind damage is told by a name without a "forged: " in front."""
    if rng.random() < 0.35:
        return blind(rng, data, other)
    kind, made = forged(rng, data, other)
    return f"forged: {kind}", made
