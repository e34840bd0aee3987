"""What is saved under recipe `tokens`: the log of a cache, whose ids are coded without or under the model.

A log names the steps in which a replay reads the tokens. With a model at hand and no steps told, the cache is replayed
as a whole and by 512 tokens, and the steps that give it back bit by bit are kept; else it is 512.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..archive.manifest import Manifest
from ..cache import KVCache
from ..errors import InvalidInput, InvalidRecipe
from ..identity import Identity
from ..language.blocks import Segment, blocks_of
from ..language.checks import check_blocks
from ..language.idcode import encode_ids, raw_size
from ..language.runtime import runtime_id
from ..language.tokenlog import TokenLog, sum_of
from ..recipe import TOKEN_LOG, Recipe
from .tokenreplay import Progress, compared, encode_log, replay
from .transformers import take_cache

CHUNK = 512
_SETTINGS = {"model_coded": bool, "keep_ids": bool, "chunk": int}
# how much is checked of a cache: ids coded under the model are so few bytes that checks would be most of them
_BLOCK, _SKETCHES = (256, 4096), (8, 2)


def is_tokens(recipe: Recipe) -> bool:
    """Whether a recipe keeps token ids alone."""
    return recipe.symbols.get("id") == TOKEN_LOG


def require_log(recipe: Recipe) -> tuple[bool, bool, int | None]:
    """`model_coded`, `keep_ids` and `chunk` of a recipe. Raises InvalidRecipe."""
    settings = {name: recipe.symbols.get(name) for name in _SETTINGS}
    unknown = set(recipe.symbols) - set(_SETTINGS) - {"id"}
    others = [name for name in ("reduce", "predict", "transform", "quantize", "window") if getattr(recipe, name)]
    wrong = [n for n, v in settings.items() if v is not None and type(v) is not _SETTINGS[n]]
    chunk = settings["chunk"]
    if unknown or others or wrong or (chunk is not None and chunk < 1):
        raise InvalidRecipe(
            f"recipe {recipe.name!r}: {TOKEN_LOG} takes model_coded, keep_ids (true or false), chunk (tokens) and no "
            f"other stage; got {dict(recipe.symbols)} with {others or 'none'}"
        )
    coded = bool(settings["model_coded"])
    return coded, not coded if settings["keep_ids"] is None else bool(settings["keep_ids"]), chunk


def log_of(
    recipe: Recipe,
    who: Identity,
    kv: KVCache,
    ids: np.ndarray,
    *,
    first: int,
    namespace: str,
    model: Any,
    progress: Progress | None,
) -> TokenLog:
    """The log of a cache with ids int64 (T,), whose first token has position `first`.

    Raises InvalidRecipe, InvalidInput, TokensMismatch, RuntimeMismatch.
    """
    coded, keep, chunk = require_log(recipe)
    if first or not len(ids):
        raise InvalidInput(f"a replay begins at position 0 with one token or more; got {len(ids)} from {first} on")
    if coded and model is None:
        raise InvalidRecipe("ids coded under the model need save(model=…), or reduce_with= beside identity=")
    Manifest(recipe, who, kv.geometry, namespace)  # refuses what no file could hold
    block, sketches = _BLOCK[coded], _SKETCHES[coded]
    segments = (Segment(len(ids), min(chunk or CHUNK, len(ids))),)
    checks = check_blocks(kv, blocks_of(segments, block), sketches)
    log = TokenLog(who, kv.geometry, namespace, segments, block, checks.sums, checks.sketches, sum_of(ids))
    log = replace(log, ids=encode_ids(ids))
    if coded:
        made = encode_log(model, ids, kv.geometry, raw_size(ids) + 1, progress)
        if made is not None:
            stream, cache = made
            log = replace(log, coded=stream, runtime=runtime_id(model), ids=log.ids if keep else None)
            if compared(take_cache(cache), log, segments).exact:
                return replace(log, segments=(Segment(len(ids), 1),))
    if chunk is None and model is not None:
        for steps in sorted({len(ids), min(CHUNK, len(ids))}, reverse=True):
            tried = (Segment(len(ids), steps),)
            cache = replay(model, ids, kv.geometry, tried, None if coded else progress)
            if compared(take_cache(cache), log, tried).exact:
                return replace(log, segments=tried)
    return log
