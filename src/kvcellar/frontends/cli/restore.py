"""`kvcellar restore`: the stored cache as a safetensors file, for programs that know no archives.

The file is written layer by layer, so that no more than one layer is in memory (all of them where a predictor ties
them together), and takes its name when it is complete. Format: the length of the header (8 bytes, little-endian), a
JSON header, then the tensors' bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from ...errors import InvalidInput, StorageError
from .common import emit, facts, human_bytes, json_option, namespace_option, progress

MARK = "kvcellar restore/1"
MAX_HEADER = 100_000_000  # what safetensors itself reads
_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}


@click.command("restore")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--out", required=True, type=click.Path(dir_okay=False), help="The safetensors file to write.")
@click.option(
    "--model",
    "model_dir",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of the transformers model that FILE must belong to.",
)
@click.option("--identity", help="Instead of a model: the name under which FILE must have been saved.")
@click.option("--positions", help="Which tokens: A:B, from A up to but without B; several with commas. Default: all.")
@click.option("--layers", "chosen_layers", help="Which layers, written like --positions. Default: all.")
@click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Convert by value. Default: as stored."
)
@click.option("--force", is_flag=True, help="Replace a file at OUT that no restore wrote.")
@namespace_option
@json_option
def command(
    file: str,
    out: str,
    model_dir: str | None,
    identity: str | None,
    positions: str | None,
    chosen_layers: str | None,
    dtype: str | None,
    force: bool,
    namespace: str,
    as_json: bool,
) -> None:
    """Write the cache in the archive FILE into a safetensors file.

    Its tensors: layers.0.keys and layers.0.values (heads, tokens, width) and so on, tokens (ids) and positions, both
    int64. Sliding layers hold fewer tokens: layers.N.positions says which. Its metadata: identity, recipe,
    next_position, namespace. With --model or --identity, an archive of another
    model is refused; without, the metadata says whose cache it is.

    \b
    Examples:
      kvcellar restore out.kvc --out cache.safetensors
      kvcellar restore out.kvc --out few.safetensors --positions 0:4,1900:2000 --layers 0:2
    """
    if model_dir is not None and identity is not None:
        raise InvalidInput("give --model or --identity, not both")
    goal = _goal(file, out, force=force)
    from ..library import open as open_archive
    from ..tokensave import is_tokens
    from .tokens import replayed_archive

    with open_archive(file, namespace=namespace) as found:  # fails before a model is loaded
        replayed = is_tokens(found.manifest.recipe)
        if replayed and model_dir is None:
            from .models import folder_of

            model_dir = str(folder_of(found.manifest.identity))
    who, model = identity, None
    if model_dir is not None:
        from .models import LocalModel

        if not as_json:
            click.echo(f"loading {Path(model_dir).name} …", err=True)
        local = LocalModel(model_dir)
        who, model = local.identity, local.model  # type: ignore[assignment]
    started = time.perf_counter()
    with ExitStack() as stack:
        archive: Any = stack.enter_context(open_archive(file, identity=who, namespace=namespace, replay_with=model))
        manifest, info = archive.manifest, archive.info()
        if replayed:
            archive = stack.enter_context(replayed_archive(archive, local, goal.parent, quiet=as_json))
        spans = ranges(positions, len(archive), "--positions")
        layers = [index for span in ranges(chosen_layers, info.layers, "--layers") for index in span]
        result = _written(archive, manifest.recipe, goal, spans, layers, dtype, quiet=as_json)
    result |= {
        "archive": file,
        "out": str(goal),
        "identity": manifest.identity.to_json(),
        "recipe": manifest.recipe.name,
        "restore_s": time.perf_counter() - started,
    }
    rows = {
        "written": f"{goal}, {human_bytes(result['bytes'])}",
        "model": str(manifest.identity),
        "tokens": f"{result['tokens']:,} of {info.tokens:,}; the next position is {result['next_position']:,}",
        "layers": f"{len(layers)} of {info.layers}",
        "took": f"{result['restore_s']:.2f} s",
    }
    emit(result, facts(rows), as_json=as_json)


def ranges(text: str | None, count: int, what: str) -> list[range]:
    """'A:B,C' as ascending ranges that neither overlap nor leave 0…count−1. Raises InvalidInput."""
    spans: list[range] = []
    for piece in (text if text is not None else f"0:{count}").split(","):
        found = re.fullmatch(r"\s*(\d{0,18})(:?)(\d{0,18})\s*", piece)
        if not found or not any(found.groups()):
            raise InvalidInput(f"{what} {text!r}: expected A:B or A, several of them with commas")
        first, colon, last = found.groups()
        start = int(first or 0)
        stop = (int(last) if last else count) if colon else start + 1
        if not start < stop <= count:
            raise InvalidInput(f"{what} {piece.strip()!r} names nothing, or more than 0…{count - 1}")
        if spans and start < spans[-1].stop:
            raise InvalidInput(f"{what} {text!r}: {start} comes after {spans[-1].stop - 1}; expected ascending ranges")
        spans.append(range(start, stop))
    return spans


def _goal(file: str, out: str, *, force: bool) -> Path:
    """Where `out` really leads, unless something is there that must not be replaced. Raises InvalidInput."""
    goal = Path(os.path.realpath(out))
    try:
        there = goal.stat()
    except (FileNotFoundError, NotADirectoryError):
        return goal
    except OSError as error:
        raise StorageError(error.errno, f"{out}: {error.strerror}") from error
    if not stat.S_ISREG(there.st_mode):
        raise StorageError(errno.EINVAL, f"{out}: not a regular file")
    if os.path.exists(file) and os.path.samefile(file, goal):
        raise InvalidInput(f"{out} is the archive itself; give --out another name")
    if not force and not _from_a_restore(goal):
        raise InvalidInput(f"{out} is there and no restore wrote it; --force replaces it")
    return goal


def _from_a_restore(path: Path) -> bool:
    """Whether the file begins like those this command writes."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= MAX_HEADER else {}
        return bool(header["__metadata__"]["format"] == "pt" and header["__metadata__"]["kvcellar"] == MARK)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _written(
    archive: Any, recipe: Any, goal: Path, spans: list[range], layers: list[int], dtype: str | None, *, quiet: bool
) -> dict[str, Any]:
    """Write the file; says what is in it."""
    import numpy as np

    from ...geometry import SLIDING
    from ...held import is_prefix, wanted
    from ...store.local import LocalStore

    reader, geometry = archive._open(), archive.manifest.geometry.layers
    count = sum(map(len, spans))
    if not reader.regular and count < reader.tokens:
        raise InvalidInput("the positions of single tokens are not stored: only the whole archive can be restored")
    indexes = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    tokens: dict[str, Any] = {"tokens": _ids(reader, spans)}
    if reader.regular:
        tokens["positions"] = indexes + reader.first_position
    read = {i: ranges for i, ranges in wanted(reader, spans, layers).items() if ranges}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for i, held in read.items():
        slots = sum(map(len, held))
        if geometry[i].kind == SLIDING and reader.regular:
            tokens[f"layers.{i}.positions"] = np.arange(held[0].start, held[0].stop) + reader.first_position
        for name, side in (("keys", geometry[i].key), ("values", geometry[i].value)):
            shapes[f"layers.{i}.{name}"] = (dtype or side.dtype, (side.heads, slots, side.width))
    next_position = reader.position_after(count if is_prefix(spans) else reader.tokens)
    shapes = {name: ("int64", numbers.shape) for name, numbers in tokens.items()} | shapes
    with (
        LocalStore(goal.parent).replacing(goal.name) as pending,
        progress("restore", len(read), quiet=quiet) as advance,
    ):
        pending.append(_header(archive.manifest, recipe, next_position, shapes))
        for numbers in tokens.values():
            pending.append(numbers.astype("<i8").tobytes())
        for data in _layers(archive, read, dtype):
            pending.append(data)
            advance(1)
        size = pending.size()
    return {
        "tokens": count,
        "layers": layers,
        "dtype": dtype,
        "next_position": next_position,
        "tensors": list(shapes),
        "bytes": size,
    }


def _ids(reader: Any, spans: list[range]) -> Any:
    """Token ids, int64 (T,), of `spans`."""
    import numpy as np

    found = []
    for span in spans:
        for block in reader.blocks(span.start, span.stop):
            start = block.head.start
            found.append(block.head.tokens[max(span.start, start) - start : min(span.stop, block.stop) - start])
    return np.concatenate(found)


def _layers(archive: Any, read: Mapping[int, list[range]], dtype: str | None) -> Iterator[bytes]:
    """Keys, then values of each layer, layer by layer; at once where a layer is foreseen from shallower ones."""
    import torch

    from ..transformers import _converted, dtype_of

    alone = not archive._ready_pipeline().chained
    for group in [[i] for i in read] if alone else [list(read)]:
        out = archive._decode({i: read[i] for i in group})
        for i in group:
            layer = out.pop(i)
            sides = [
                _converted(x, dtype_of(dtype), None, f"layer {i}").contiguous() for x in (layer.keys, layer.values)
            ]
            yield b"".join(x.view(torch.uint8).numpy().tobytes() for x in sides if x.numel())


def _header(manifest: Any, recipe: Any, next_position: int, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Length and JSON of the tensors, which lie one behind the other, and of what they are."""
    import math

    metadata = {
        "format": "pt",
        "kvcellar": MARK,
        "identity": json.dumps(manifest.identity.to_json(), ensure_ascii=False),
        "recipe": json.dumps(recipe.to_json(), ensure_ascii=False),
        "namespace": manifest.namespace,
        "next_position": str(next_position),
    }
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * {"int64": 8, "float32": 4}.get(dtype, 2)
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
