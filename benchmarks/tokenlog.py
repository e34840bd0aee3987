"""Token logs: bits a token without a model and under it, beside general codecs, and what a replay takes.

    python benchmarks/tokenlog.py [--data FOLDER] [--tokens 4096] [--coded 512] [--under-model docs,essays]

For each kind of text that `texts.toml` declares, the first `--tokens` ids of its joined documents in the demo model's
tokenizer, coded by `ids/1` and by zstd-19 and lzma over packed ids (little-endian 16 bits, or the high bytes before the
low ones, whichever is smaller). For test texts of the kinds `--under-model`, the model's cross-entropy of the first
`--coded` ids beside the bytes of the log that is coded under it, which is slow: the model runs token by token. A part
that is in benchmarks/results/tokenlog.json already is not run again (--anew runs it).
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

import kvcellar
from common import HERE, RESULTS, machine, rounded, write_result
from kvcellar.evaluate.texts import load_sources
from kvcellar.frontends.cli.demo_model import demo_model
from kvcellar.frontends.cli.models import LocalModel, empty_cache
from kvcellar.language.idcode import decode_ids, encode_ids, raw_size
from kvcellar.language.tokenlog import TokenLog

KINDS = ("encyclopedia", "essays", "docs", "code")


def packed(ids: np.ndarray) -> list[bytes]:
    """Ids of 16 bits as they are, and with all high bytes before all low ones."""
    words = ids.astype("<u2")
    return [words.tobytes(), words.view(np.uint8).reshape(-1, 2).T[::-1].tobytes()]


def model_free(ids: np.ndarray) -> dict[str, float]:
    started = time.perf_counter()
    stream = encode_ids(ids)
    encoded = time.perf_counter()
    same = np.array_equal(decode_ids(stream, len(ids)), ids)
    decoded = time.perf_counter()
    assert same
    sizes = {
        "ids/1": len(stream),
        "packed": raw_size(ids),
        "zstd-19": min(len(zstandard.ZstdCompressor(level=19).compress(data)) for data in packed(ids)),
        "lzma": min(len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) for data in packed(ids)),
    }
    bits = {f"bits_{name}": 8 * size / len(ids) for name, size in sizes.items()}
    return {"tokens": len(ids), **bits, "encode_s": encoded - started, "decode_s": decoded - encoded}


def under_model(local: LocalModel, ids: np.ndarray) -> dict[str, Any]:
    """Bytes of the log coded under the model beside its cross-entropy of ids 1 … T − 1, read in one step."""
    with torch.no_grad():
        logits = local.model(torch.from_numpy(ids)[None]).logits[0, :-1]
    nats = torch.nn.functional.cross_entropy(logits.double(), torch.from_numpy(ids[1:]), reduction="sum")
    entropy = float(nats) / np.log(2) / 8
    cache = empty_cache()
    started = time.perf_counter()
    local.prefill(ids, cache, quiet=True)
    prefilled = time.perf_counter()
    found: dict[str, Any] = {"coded_tokens": len(ids), "entropy_bytes": entropy, "prefill_s": prefilled - started}
    with tempfile.TemporaryDirectory() as folder:
        for name, coded in (("free", False), ("coded", True)):
            recipe, path = kvcellar.tokens_recipe(model_coded=coded, chunk=512), Path(folder) / f"{name}.kvc"
            started = time.perf_counter()
            info = kvcellar.save(path, cache, tokens=ids, model=local.model, recipe=recipe)
            saved = time.perf_counter()
            with kvcellar.open(path, model=local.model) as archive:
                restored = archive.restore()
            took = time.perf_counter() - saved
            replay = restored.replay
            found |= {f"{name}_file": info.file_bytes, f"{name}_save_s": saved - started, f"{name}_restore_s": took}
            found |= {f"{name}_exact": replay.exact, f"{name}_distance": replay.distance}
            stream = TokenLog.unpack(path.read_bytes(), name).coded
        found["coded_stream"] = None if stream is None else len(stream)
    found["limit"] = 1.02 * entropy + 64
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Token logs against general codecs and the model's entropy.")
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared" / "data")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--coded", type=int, default=512)
    parser.add_argument("--under-model", default="encyclopedia,essays,docs,code")
    parser.add_argument("--anew", action="store_true")
    arguments = parser.parse_args()
    local = LocalModel(demo_model(), "float32")
    sources = load_sources(HERE / "texts.toml", arguments.data)
    path = RESULTS / "tokenlog.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() and not arguments.anew else {}
    for role in ("tune", "test"):
        for kind in KINDS:
            text = "\n\n".join(document.text for document in sources.documents(role, [kind]))
            name = f"{kind}, {role}"
            asked = {
                "tokens": arguments.tokens,
                "coded_tokens": arguments.coded
                if role == "test" and kind in arguments.under_model.split(",")
                else None,
            }
            if not text or all(rows.get(name, {}).get(key, 0) == value for key, value in asked.items()):
                continue
            ids = np.array(local.encode(text[: 12 * arguments.tokens])[: arguments.tokens], np.int64)
            rows[name] = model_free(ids) | {"coded_tokens": None}
            if asked["coded_tokens"]:
                rows[name] |= under_model(local, ids[: arguments.coded])
            print(name, json.dumps(rounded(rows[name])), flush=True)
            write_result("tokenlog", {"machine": machine(), "dtype": "float32", "rows": rows})
    print(json.dumps(rounded({"rows": rows})))


if __name__ == "__main__":
    main()
