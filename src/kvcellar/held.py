"""Which tokens an archive holds of sliding layers, and which prefixes of it can therefore be restored.

A cache's sliding layer holds the last window − 1 tokens, so an archive saved at once holds no more of it either; what
was appended in small steps is held without a gap. A prefix of n tokens can go on when every sliding layer has the
window − 1 tokens before n.
"""

from __future__ import annotations

from collections.abc import Sequence

from .archive.reader import ArchiveReader
from .errors import InvalidInput
from .geometry import FULL, SLIDING


def held(reader: ArchiveReader, layer: int, start: int, stop: int) -> list[range]:
    """Runs of the tokens `start`…`stop` that are stored for `layer`, ascending."""
    runs: list[range] = []
    for block in reader.blocks(start, stop):
        tokens = block.head.tokens_of(layer)
        part = range(max(start, tokens.start), min(stop, tokens.stop))
        if part and runs and runs[-1].stop == part.start:
            runs[-1] = range(runs[-1].start, part.stop)
        elif part:
            runs.append(part)
    return runs


def needed(window: int, prefix: int) -> range:
    """The tokens a sliding layer needs so that a prefix of so many tokens can go on."""
    return range(max(0, prefix - window + 1), prefix)


def usable_prefix(reader: ArchiveReader, limit: int) -> int:
    """The longest prefix of at most `limit` tokens whose sliding layers are all there; `limit` itself without any."""
    geometry = reader.manifest.geometry
    layers = {run: layer for layer, run in geometry.sliding_runs.items()}.values()
    if all(_holds(reader, layer, needed(geometry.layers[layer].window, limit)) for layer in layers):
        return limit
    allowed = [range(limit)]
    for layer in layers:
        window = geometry.layers[layer].window
        runs = held(reader, layer, 0, reader.tokens)
        ends = [range(run.start + window - 1 if run.start else 0, run.stop + 1) for run in runs]
        allowed = [
            range(max(a.start, b.start), min(a.stop, b.stop))
            for a in allowed
            for b in ends
            if max(a.start, b.start) < min(a.stop, b.stop)
        ]
    return max((each.stop - 1 for each in allowed), default=0)


def _holds(reader: ArchiveReader, layer: int, tokens: range) -> bool:
    return not tokens or held(reader, layer, tokens.start, tokens.stop) == [tokens]


def is_prefix(spans: Sequence[range]) -> bool:
    return not spans or (len(spans) == 1 and spans[0].start == 0)


def wanted(reader: ArchiveReader, spans: Sequence[range], layers: Sequence[int]) -> dict[int, list[range]]:
    """What to read of each layer to restore the tokens of `spans`. Raises InvalidInput when a window is not there."""
    geometry = reader.manifest.geometry
    if geometry.sliding_runs:
        if not is_prefix(spans):
            raise InvalidInput("an archive with sliding layers can be restored whole or as a prefix, not in pieces")
        prefix = sum(map(len, spans))
        if (usable := usable_prefix(reader, prefix)) != prefix:
            raise InvalidInput(
                f"the first {prefix} tokens cannot be restored: sliding layers hold other tokens than the ones before "
                f"{prefix}; the longest shorter prefix that can be restored has {usable} tokens"
            )
    found: dict[int, list[range]] = {}
    for i in layers:
        layer = geometry.layers[i]
        if layer.kind == SLIDING:
            found[i] = [needed(layer.window, sum(map(len, spans)))]
        else:
            found[i] = list(spans) if layer.kind == FULL else []
    return found
