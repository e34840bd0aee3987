"""Saving and restoring reduced caches: as a whole, for a model whose attention can apply their weights.

A cache is reduced before it is saved, or while it is, by a recipe whose `reduce` names a method and what to keep.
Tried on: CPU, transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ..archive.manifest import Manifest
from ..archive.reader import ArchiveReader
from ..archive.writer import NewBlock
from ..cache import KVCache, Restored
from ..errors import InvalidInput, InvalidRecipe, MissingExtra, TokensMismatch, UnsupportedCache
from ..recipe import Recipe
from ..slots import SlotCoder, decode_slots, encode_slots, reduced_recipe
from .inputs import spans_of, take_row, token_ids
from .transformers import Device

_KEEP = ("keep", "sinks", "recent", "seed")


def is_reduced(cache: Any) -> bool:
    """Whether a cache holds slots with weights already; asking needs no transformers."""
    return cache.reduced if isinstance(cache, KVCache) else type(cache).__name__ == "WeightedCache"


def take_reduced(
    cache: Any,
    tokens: Any,
    recipe: Recipe,
    model: Any,
    row: int,
    attention_mask: Any,
    positions: Any,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[KVCache, np.ndarray, Recipe]:
    """A reduced cache, the ids (T,) of all tokens it stands for, and the recipe that says what reduced it.

    Raises InvalidRecipe where `recipe` cannot reduce this cache, InvalidInput where it is reduced already, and for
    masks and positions, which slots have no use for.
    """
    if not is_reduced(cache):
        return _reduced_now(cache, tokens, recipe, model, row, attention_mask, positions, progress)
    if attention_mask is not None or positions is not None:
        raise InvalidInput("attention_mask and positions say nothing of a reduced cache, whose slots have their own")
    ids = token_ids(tokens, row)
    if isinstance(cache, KVCache):
        kv, reduction = cache, None
    else:
        from .reduce import taken

        layers, length, _ = taken(cache, row)
        if any(layer.log_weights is None for layer in layers):
            raise UnsupportedCache("sliding layers beside reduced ones cannot be stored")
        kv, reduction = KVCache(tuple(layers), length), cache.reduction
    if len(ids) != len(kv):
        raise TokensMismatch(
            f"the cache stands for {len(kv)} tokens, {len(ids)} token ids were given: those of all tokens are needed, "
            "not of the slots alone"
        )
    return kv, ids, reduced_recipe(recipe, reduction)


def _reduced_now(
    cache: Any,
    tokens: Any,
    recipe: Recipe,
    model: Any,
    row: int,
    attention_mask: Any,
    positions: Any,
    progress: Callable[[int, int], None] | None,
) -> tuple[KVCache, np.ndarray, Recipe]:
    settings = dict(recipe.reduce or {})
    told = {name: settings.pop(name) for name in _KEEP if name in settings}
    if "keep" not in told:
        raise InvalidRecipe(f"recipe {recipe.name!r} reduces tokens and does not say how many to keep: keep is missing")
    if model is None:
        raise InvalidRecipe(
            f"recipe {recipe.name!r} reduces tokens, for which save needs model= (or reduce_with= beside identity=): "
            "it says which queries read which keys. A cache that is reduced already can be saved without it"
        )
    try:
        from .methods import find_reducer
        from .reduce import queries_for, reduce_layers
    except ImportError as error:
        raise MissingExtra("reducing a cache needs the extra: pip install 'kvcellar[hf]'") from error
    reducer = find_reducer(settings)
    kv, ids, first = take_row(cache, tokens, row, attention_mask, positions)
    if first:
        raise UnsupportedCache(f"a cache that begins at position {first} cannot be stored reduced; expected from 0")
    SlotCoder(recipe, kv.geometry)
    try:
        queries = queries_for(reducer, model, kv, ids) if reducer.needs_queries else None
        keep = told.pop("keep")
        layers = reduce_layers(
            kv, budget=keep, model=model, reducer=reducer, queries=queries, progress=progress, **told
        )
    except InvalidRecipe:
        raise
    except (InvalidInput, TypeError) as error:
        raise InvalidRecipe(f"recipe {recipe.name!r} cannot reduce this cache: {error}") from error
    return KVCache(tuple(layers), len(kv)), ids, recipe


def slot_blocks(manifest: Manifest, kv: KVCache, ids: np.ndarray) -> Iterator[NewBlock]:
    """The blocks of a reduced cache. Raises InvalidRecipe at once for a recipe that cannot hold it."""
    return encode_slots(SlotCoder(manifest.recipe, manifest.geometry), manifest, kv, ids)


def restore_reduced(
    reader: ArchiveReader,
    config: Any,
    *,
    positions: Any,
    prompt: Any,
    layers: Any,
    dtype: torch.dtype | None,
    device: Device | Mapping[int, Device] | None,
    into: Any,
) -> Restored:
    """The whole archive as a `WeightedCache` for the model with `config`.

    Raises InvalidInput for a part of it, and for a prompt that does not go on behind its last token.
    """
    tokens = reader.tokens
    if config is None:
        raise InvalidInput(
            f"{reader.reader.name} holds a reduced cache, whose weights the model's attention has to apply: open it "
            "with model=, or with config= beside identity="
        )
    if layers is not None or into is not None:
        raise InvalidInput("layers= and into= do not go with a reduced cache: it is restored as a whole")
    if prompt is not None:
        ids = token_ids(prompt, what="prompt")
        matched, _ = reader.match(ids)
        if matched < tokens or len(ids) <= tokens:
            raise InvalidInput(
                f"the prompt shares {matched} of its {len(ids)} tokens with a reduced archive of {tokens}: it is of "
                "use only as a whole, to prompts that begin with all of its tokens and go on"
            )
    elif positions is not None and spans_of(positions, tokens) != [range(tokens)]:
        raise InvalidInput(f"positions of a reduced archive: it is restored as a whole, all {tokens} tokens")
    try:
        from .weighted import weighted_cache
    except ImportError as error:
        raise MissingExtra("a transformers cache needs the extra: pip install 'kvcellar[hf]'") from error
    manifest = reader.manifest
    held = decode_slots(SlotCoder(manifest.recipe, manifest.geometry), reader)
    cache = weighted_cache(held, config, length=tokens, dtype=dtype, device=device, reduction=manifest.recipe.reduce)
    return Restored(cache, tokens, reader.position_after(tokens))
