"""Blocks of a reduced cache: per layer and KV head the slots that stand for the tokens, each at its token's place.

A reduced head is a list of (position, log-weight, key, value), at most one for each token. A block covers the same
tokens for all layers and heads, and holds those slots whose positions it covers; what it holds of a layer is

    bitmap (which of its tokens have a slot, per head) | log-weights | the recipe's symbols of K and V, head by head

so that a block stays small however long the text is, and every number of slots follows from bits that can only mean
one thing. The symbols are those of a bit-exact recipe. A summary of all tokens is of no use in part: weights and
values were chosen together. So such an archive is restored as a whole and not appended to.

Bytes: docs/format.md §10. Tried on: CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .archive.block import SLOTS, BlockHead, part_table
from .archive.manifest import Manifest
from .archive.reader import ArchiveReader, Block
from .archive.writer import NewBlock
from .cache import KVCache, LayerKV, torch_dtype
from .errors import DamagedArchive, InvalidInput, InvalidRecipe, UnsupportedCache
from .geometry import Geometry, LayerGeometry
from .quantize.bits import bits
from .recipe import Recipe
from .stages import CausalCoder, SymbolCoder, build
from .window import FineWindow

Head = tuple[Tensor, Tensor, Tensor, Tensor]
"""A head's keys (S, Dk), values (S, Dv), positions int64 (S,) and log-weights float32 (S,), ascending by position."""


def stacked(heads: Sequence[Head], length: int) -> LayerKV:
    """The KV heads of a layer that stands for `length` tokens; heads with fewer slots get pads of log-weight −inf."""
    most = max(len(positions) for _, _, positions, _ in heads)

    def filled(x: Tensor, value: float) -> Tensor:
        return torch.cat([x, x.new_full((most - len(x), *x.shape[1:]), value)])

    keys, values, positions, weights = zip(*heads, strict=True)
    return LayerKV(
        torch.stack([filled(x, 0) for x in keys]),
        torch.stack([filled(x, 0) for x in values]),
        positions=torch.stack([filled(x, -1) for x in positions]),
        log_weights=torch.stack([filled(x, -math.inf) for x in weights]),
        length=length,
    )


def head_of(kv: LayerKV, head: int) -> Head:
    """One head of a layer, without pads, in the order of its slots."""
    keys, values = kv.keys[head], kv.values[head]
    positions = torch.arange(kv.slots) if kv.positions is None else kv.positions.expand(len(kv.keys), -1)[head]
    positions = positions.to(torch.int64)
    if kv.log_weights is None:
        return keys, values, positions, torch.zeros(kv.slots)
    weights = kv.log_weights[head].float()
    real = weights != -math.inf  # what is no number is no pad
    return keys[real], values[real], positions[real], weights[real]


class SlotCoder:
    """The recipe's symbols for slots. Raises InvalidRecipe for recipes that are not bit-exact, UnsupportedCache."""

    def __init__(self, recipe: Recipe, geometry: Geometry):
        if recipe.quantize is not None or recipe.predict is not None or recipe.transform is not None or recipe.window:
            raise InvalidRecipe(
                f"recipe {recipe.name!r} is lossy and reduces tokens: a reduced cache is stored bit-exactly, since its "
                "slots have no common tokens that a prediction or a transform could go by. Use recipe 'exact'"
            )
        for index, layer in enumerate(geometry.layers):
            if layer.kind != "full" or layer.key.heads != layer.value.heads:
                raise UnsupportedCache(
                    f"layer {index} is a {layer.kind} layer of {layer.key.heads} key and {layer.value.heads} value "
                    "heads; a reduced cache is stored where all layers are full ones with as many heads of both"
                )
        self.recipe, self.geometry = recipe, geometry
        self.symbols: SymbolCoder = build("symbols", recipe.symbols)
        if isinstance(self.symbols, CausalCoder):
            raise InvalidRecipe(
                f"recipe {recipe.name!r} foresees each number from others of its token: slots have no common tokens. "
                "Use recipe 'exact'"
            )

    def encode(self, heads: Sequence[Head], span: range, layer: int) -> tuple[bytes, int]:
        """A layer's part of the block that covers the positions `span`, and how many slots are in it."""
        cut = [slice(*torch.searchsorted(h[2], torch.tensor([span.start, span.stop])).tolist()) for h in heads]
        held = np.zeros((len(heads), len(span)), bool)
        for row, head, part in zip(held, heads, cut, strict=True):
            row[head[2][part].numpy() - span.start] = True
        weights = torch.cat([head[3][part] for head, part in zip(heads, cut, strict=True)]).numpy()
        sides = [[bits(head[side][part][None]) for head, part in zip(heads, cut, strict=True)] for side in (0, 1)]
        bitmap = np.packbits(held, axis=1, bitorder="little").tobytes()
        symbols = self.symbols.encode([*sides[0], *sides[1]], range(layer, layer + 1))
        return bitmap + weights.astype("<f4").tobytes() + symbols, int(held.sum())

    def decode(self, parts: Sequence[memoryview], span: range) -> list[list[Head]]:
        """The heads of every layer from the parts of the block that covers `span`. Raises DamagedArchive."""
        layers: list[list[Head]] = []
        streams: list[memoryview] = []
        out: list[list[np.ndarray]] = []
        for index, (part, layer) in enumerate(zip(parts, self.geometry.layers, strict=True)):
            try:
                heads, stream = self._allocated(part, span, layer)
            except DamagedArchive as error:
                raise DamagedArchive(f"layer {index}", error.problem) from error
            layers.append(heads)
            streams.append(stream)
            out.append([bits(head[side][None]) for side in (0, 1) for head in heads])
        self.symbols.decode(streams, out, [range(i, i + 1) for i in range(len(layers))])
        return layers

    def _allocated(self, part: memoryview, span: range, layer: LayerGeometry) -> tuple[list[Head], memoryview]:
        """A layer's heads with positions and weights, keys and values still empty, and the bytes that hold those."""
        heads, row = layer.key.heads, (len(span) + 7) // 8
        bitmap = np.frombuffer(part[: heads * row], np.uint8)
        if len(bitmap) != heads * row:
            raise DamagedArchive("bitmap", f"{len(part)} bytes for {heads} heads of {len(span)} tokens")
        held = np.unpackbits(bitmap.reshape(heads, row), axis=1, bitorder="little")
        if held[:, len(span) :].any():
            raise DamagedArchive("bitmap", f"slots behind the {len(span)} tokens of the block")
        counts = held.sum(axis=1, dtype=np.int64)
        total, at = int(counts.sum()), heads * row
        weights = np.frombuffer(part[at : at + 4 * total], np.uint8)
        stream = part[at + 4 * total :]
        if len(weights) != 4 * total or total * layer.bytes_per_token > self.symbols.max_expansion * heads * len(
            stream
        ):
            raise DamagedArchive("slots", f"{len(part)} bytes for {total} slots")
        numbers = torch.from_numpy(weights.view("<f4").astype(np.float32))
        if not bool(numbers.isfinite().all()):
            raise DamagedArchive("weights", "log-weights that are no finite numbers")
        found: list[Head] = []
        ends = counts.cumsum()
        for head, (stop, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
            keys, values = (
                torch.empty(count, side.width, dtype=torch_dtype(side.dtype)) for side in (layer.key, layer.value)
            )
            positions = torch.from_numpy(np.flatnonzero(held[head]) + span.start)
            found.append((keys, values, positions, numbers[stop - count : stop]))
        return found, stream


def encode_slots(coder: SlotCoder, manifest: Manifest, kv: KVCache, ids: np.ndarray) -> Iterator[NewBlock]:
    """Blocks of a reduced cache; `ids` int64 (T,) are all tokens it stands for, positions count from 0.

    Raises InvalidInput for heads with two slots at one token, positions outside the text, or weights that are no
    finite numbers.
    """
    layers = [[_ordered(kv, i, head, len(ids)) for head in range(len(kv.keys))] for i, kv in enumerate(kv.layers)]
    window = FineWindow(manifest.recipe, len(ids))
    for span in window.blocks(0):
        coded = [coder.encode(heads, span, index) for index, heads in enumerate(layers)]
        parts = [part for part, _ in coded]
        head = BlockHead(
            start=span.start,
            tokens=ids[span.start : span.stop],
            sealed=window.seals(span),
            geometry=manifest.geometry,
            recipe=manifest.recipe.digest,
            parts=part_table(parts),
            first_position=span.start,
            kind=SLOTS,
            slots=sum(count for _, count in coded),
        )
        yield NewBlock(head, parts)


def _ordered(kv: LayerKV, layer: int, head: int, tokens: int) -> Head:
    keys, values, positions, weights = head_of(kv, head)
    order = positions.argsort(stable=True)
    positions = positions[order]
    where = f"layer {layer}, head {head}"
    if not len(positions) or int(positions[0]) < 0 or int(positions[-1]) >= tokens:
        raise InvalidInput(f"{where}: {len(positions)} slots, expected some at positions 0…{tokens - 1}")
    if bool((positions.diff() == 0).any()):
        raise InvalidInput(f"{where}: two slots at one position; a token can have one")
    if not bool(weights.isfinite().all()):
        raise InvalidInput(f"{where}: log-weights that are no finite numbers")
    return keys[order], values[order], positions, weights[order]


def decode_slots(coder: SlotCoder, reader: ArchiveReader) -> list[LayerKV]:
    """All layers of a reduced archive. Raises DamagedArchive."""
    blocks = list(reader.blocks(0, reader.tokens))
    found = [_decoded(coder, reader, block) for block in blocks]
    if not found:
        raise DamagedArchive("blocks", "a reduced archive without any")
    layers = []
    for index, of_blocks in enumerate(zip(*found, strict=True)):
        heads: list[Head] = []
        for pieces in zip(*of_blocks, strict=True):
            keys, values, positions, weights = (torch.cat(each) for each in zip(*pieces, strict=True))
            heads.append((keys, values, positions, weights))
        if any(not len(head[2]) for head in heads):
            raise DamagedArchive("blocks", f"layer {index} has a head without slots")
        layers.append(stacked(heads, reader.tokens))
    return layers


def _decoded(coder: SlotCoder, reader: ArchiveReader, block: Block) -> list[list[Head]]:
    head, groups = block.head, range(len(coder.geometry))
    if len(head.parts) != len(groups):
        raise DamagedArchive(block.part, f"{len(head.parts)} parts for {len(groups)} layers")
    try:
        layers = coder.decode(reader.read_parts(block, groups), range(head.start, block.stop))
    except DamagedArchive as error:
        part = error.part if error.part.startswith(block.part) else f"{block.part}, {error.part}"
        raise DamagedArchive(part, error.problem) from error
    slots = sum(len(positions) for heads in layers for _, _, positions, _ in heads)
    if slots != head.slots:
        raise DamagedArchive(block.part, f"{slots} slots, its head says {head.slots}")
    return layers


def reduced_recipe(recipe: Recipe, reduction: dict[str, object] | None) -> Recipe:
    """`recipe` for a cache that was reduced before, by what `reduction` says of it."""
    if recipe.reduce is not None:
        raise InvalidInput(f"recipe {recipe.name!r} reduces tokens, and the cache is reduced already")
    return replace(recipe, name=f"{recipe.name}, reduced", reduce=reduction or {"id": "given/1"})
