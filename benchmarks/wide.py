"""What recipe `cellar` would weigh and cost for a wide model: profile bytes and decode FLOPs by grouping, computed.

Counts the tensors that linear/1, klt/1, deadzone/1 and adaptive/1 keep and the multiplications that a restore makes
(two FLOPs each), for Llama-3-8B by default: 32 layers, 8 KV heads x 128. Nothing is run or fitted. The same count for
the demo model is compared with the profile under $KVCELLAR_HOME when one is there. Besides the layout as it is
("layer": a root of the metric for each layer's whole row) two others are counted that the stages do not have yet:
groups of some of the heads, and "head": a root for each head's keys and values alone. Says nothing of quality. The last
line is JSON.

    python benchmarks/wide.py --out benchmarks/results/wide.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from kvcellar.geometry import Geometry, LayerGeometry, SideGeometry
from kvcellar.profile import all_profiles
from kvcellar.recipe import CELLAR
from kvcellar.transform.klt import LOUD

SEEN, TOKENS_SEEN = 2, 4  # layers of the group above, and tokens, whose features linear/1 looks at
TABLE = 2 * 19_200 + 4 * 160 * 4  # of adaptive/1, for each array of symbols
ARRAYS = 9  # of symbols in a group: of three presets and the fine grade
MOST_BYTES, SHARE = 100e6, 50


@dataclass(frozen=True)
class Model:
    """What counts of a model; `parameters` are those a token passes (embedding rows are only looked up)."""

    name: str
    layers: int
    heads: int
    width: int
    vocabulary: int
    parameters: float
    query_heads: int

    @property
    def numbers(self) -> int:
        """Of one layer and token, keys and values."""
        return 2 * self.heads * self.width

    def prefill_flops(self, tokens: int) -> float:
        """Per token of a prefill of so many, attention included."""
        return 2 * self.parameters + self.layers * 4 * self.query_heads * self.width * tokens / 2


LLAMA = Model("Llama-3-8B", 32, 8, 128, 128_256, 7.505e9, 32)
SMOL = Model("SmolLM2-135M", 30, 3, 64, 49_152, 134.5e6, 9)


@dataclass(frozen=True)
class Settings:
    """A group is `layers` layers by `heads` KV heads; `share` of its numbers become coefficients."""

    layers: int
    heads: int
    coefficients: int
    rank: int
    embedding: int
    root: str = "layer"
    shared_tables: bool = False


def cost(model: Model, at: Settings) -> dict[str, Any]:
    """Bytes of the profile by part, and FLOPs per restored token."""
    parts = dict.fromkeys(("embeddings", "predictor", "roots", "basis", "vectors", "entropy tables"), 0)
    parts["embeddings"] = model.vocabulary * at.embedding + 4 * at.embedding
    heads_sets = -(-model.heads // at.heads)
    side = at.heads * model.width
    rows, matrices = (2 * side, heads_sets) if at.root == "layer" else (model.width, 2 * model.heads)
    parts["roots"] = model.layers * matrices * (rows * (rows + 1) // 2 + 4 * rows)
    flops, groups = 0, 0
    for start in range(0, model.layers, at.layers):
        sides = min(at.layers, model.layers - start) * 2
        numbers = sides * side
        above = min(SEEN, at.layers) * 2 * at.heads * model.width if start else 0
        features, count = TOKENS_SEEN * at.embedding + above, min(at.coefficients, numbers)
        rank = min(at.rank, features, numbers)
        blocks = TOKENS_SEEN + (2 * min(SEEN, at.layers) if start else 0) + sides
        parts["predictor"] += heads_sets * rank * (features + numbers + 4 * blocks)
        loud = min(LOUD, count)
        parts["basis"] += heads_sets * (2 * loud * numbers + (count - loud) * (numbers + 4 * sides))
        parts["vectors"] += heads_sets * 4 * (2 * features + 3 * numbers + count)
        parts["entropy tables"] += heads_sets * 6 * (4 * count + numbers + ARRAYS - 5)
        flops += heads_sets * 2 * (rank * (features + numbers) + count * numbers)
        groups += heads_sets
    parts["entropy tables"] += ARRAYS * TABLE * (1 if at.shared_tables else groups)
    return {"parts": parts, "bytes": sum(parts.values()), "flops": flops, "groups": groups}


def candidates(model: Model) -> Iterator[Settings]:
    """Groups of at most 4,096 numbers, by how much of them is kept."""
    for layers, heads, root in product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8), ("layer", "head")):
        numbers = layers * 2 * heads * model.width
        if numbers <= 4096 and model.heads % heads == 0:
            for part, rank, embedding in product((4, 6, 8, 12, 16), (32, 64, 128, 256), (64, 128, 192)):
                yield Settings(layers, heads, numbers // part, rank, embedding, root, shared_tables=True)


def checked() -> dict[str, Any] | None:
    """The count for the demo model beside the bytes of its profile, where this machine has one."""
    side = SideGeometry(SMOL.heads, SMOL.width, "bfloat16")
    wanted = Geometry((LayerGeometry(side, side),) * SMOL.layers).to_json()
    stages = {kind: settings["id"] for kind in ("predict", "transform") if (settings := getattr(CELLAR[0], kind))}
    for path, metadata in all_profiles():
        fitted: Any = metadata.get("fitted")
        if metadata.get("geometry") == wanted and {k: fitted[k]["id"] for k in stages if k in fitted} == stages:
            predict, transform = fitted["predict"], fitted["transform"]
            names = predict["layers_per_group"], SMOL.heads, transform["coefficients"]
            counted = cost(SMOL, Settings(*names, predict["rank"], predict["embedding"]))["bytes"]
            return {"counted": counted, "on_disk": path.stat().st_size, "profile": path.stem[:16]}
    return None


def best(model: Model, limit: float) -> list[dict[str, Any]]:
    """Of each grouping and root, the settings within both limits that keep most coefficients, then the highest rank."""
    found: dict[tuple[Any, ...], tuple[Any, dict[str, Any]]] = {}
    for at in candidates(model):
        row = cost(model, at)
        if row["bytes"] <= MOST_BYTES and row["flops"] <= limit:
            numbers = at.layers * 2 * at.heads * model.width
            worth = at.coefficients / numbers, at.rank, at.embedding
            key = at.layers, at.heads, at.root
            if key not in found or found[key][0] < worth:
                found[key] = worth, {**asdict(at), "numbers": numbers, **row}
    return [row for _, row in sorted(found.values(), key=lambda each: each[0], reverse=True)]


def line(name: str, row: dict[str, Any], prefill: float) -> str:
    parts = ", ".join(f"{part} {size / 1e6:.1f}" for part, size in row["parts"].items())
    share = f"{row['flops'] / 1e6:.0f} MFLOP = 1/{prefill / row['flops']:.0f}"
    return f"{name}: {row['bytes'] / 1e6:.1f} MB ({parts}); {share}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="length of the prefill to compare with")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    prefill = LLAMA.prefill_flops(arguments.tokens)
    check = checked()
    if check:
        print(f"check: {SMOL.name} counted {check['counted']:,} bytes, its profile on disk {check['on_disk']:,}")
    now = Settings(10, LLAMA.heads, 768, 256, 128)
    as_is = {**asdict(now), **cost(LLAMA, now)}
    print(f"{LLAMA.name}: prefill {prefill / 1e9:.1f} GFLOP a token; limits {MOST_BYTES / 1e6:.0f} MB and 1/{SHARE}")
    print(line("as the preset is", as_is, prefill))
    rows = best(LLAMA, prefill / SHARE)
    for row in rows:
        name = f"{row['layers']} layers x {row['heads']} heads, root of a {row['root']}, {row['coefficients']} of "
        print(line(f"{name}{row['numbers']}, rank {row['rank']}, embedding {row['embedding']}", row, prefill))
    result = {"model": asdict(LLAMA), "tokens": arguments.tokens, "prefill_flops": prefill, "check": check}
    result |= {"limits": {"bytes": MOST_BYTES, "share_of_prefill": SHARE}, "as_is": as_is, "within": rows}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"check": check, "as_is": as_is["bytes"], "within": len(rows)}))


if __name__ == "__main__":
    main()
