"""Finding a reducer by what a user or a recipe calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRecipe
from ..reduce.weighted import REDUCERS, Reducer


def find_reducer(method: str | Reducer | Mapping[str, Any]) -> Reducer:
    """A `Reducer` as it is, one by name (``matching``), or one by its JSON object ``{"id": …, settings…}``.

    Raises InvalidRecipe for an unknown name and for settings the method does not take.
    """
    if isinstance(method, Reducer):
        return method
    settings = dict(method) if isinstance(method, Mapping) else {"id": method}
    name = settings.pop("id", None)
    by_name = {key: kind for kind in REDUCERS.values() for key in (kind.id, kind.id.partition("/")[0])} | {**REDUCERS}
    if not isinstance(name, str) or name not in by_name:
        raise InvalidRecipe(f"unknown method {name!r} to reduce by; known: {', '.join(REDUCERS)}")
    try:
        reducer: Reducer = by_name[name](**settings)
    except TypeError as error:
        raise InvalidRecipe(f"method {name!r} refuses its settings: {error}") from error
    return reducer
