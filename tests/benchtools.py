"""Short windows of made-up documents, enough for a bench on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcellar.evaluate.texts import Document, Window, windows

PREFIX, CONTINUATION = 96, 24


def small_windows(encode: Callable[[str], Sequence[int]]) -> list[Window]:
    """Three windows, one of kind docs and two essays."""
    texts = [f"Document {i} speaks of cellar number {i * i}. " * 8 for i in range(3)]
    documents = [
        Document(name=f"d{i}", kind="essays" if i else "docs", role="test", text=text) for i, text in enumerate(texts)
    ]
    return windows(documents, encode, PREFIX, CONTINUATION, 3)
