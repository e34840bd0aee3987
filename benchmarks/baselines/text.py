"""WikiText-2 as running text, and the windows of it that DESIGN's prototype was measured on.

The files hold the tokenised form (`` , ``, ``@-@``, ``" Craig "``). `detokenised` undoes it by the usual rules: joined
hyphens and numbers, no blank before punctuation, inside brackets or inside quotes, and headings without inner blanks.
The prototype's own rules are not written down anywhere; these are ours.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_RULES = [
    (re.compile(pattern), repl)
    for pattern, repl in (
        (r" @([-,.])@ ", r"\1"),
        (r" ([,.;:!?%\)\]\}])", r"\1"),
        (r"([\(\[\{]) ", r"\1"),
        (r"([$£€]) (?=\d)", r"\1"),
        (r" ('s|'t|'re|'ve|'d|'ll|'m|n't)\b", r"\1"),
        (r" ' (?=[ ,.;:])", r"' "),
        (r'" ([^"\n]*?) ?"', r'"\1"'),
        (r" – (?=\d)", "–"),
        (r"= (?==)", "="),
        (r"(?m)^ +| +$", ""),
    )
]


def detokenised(text: str) -> str:
    """The running text of WikiText's tokenised `text`."""
    for pattern, repl in _RULES:
        text = pattern.sub(repl, text)
    return text


def windows(path: Path, tokenizer: Any, count: int, length: int, stride: int) -> Tensor:
    """Windows [i·stride, i·stride + length), i < count, of the file's detokenised ids, int64 (count, length)."""
    ids = tokenizer(detokenised(path.read_text(encoding="utf-8")), add_special_tokens=False)["input_ids"]
    if len(ids) < (count - 1) * stride + length:
        raise SystemExit(f"{path.name} has {len(ids)} tokens, expected {(count - 1) * stride + length}")
    return torch.tensor([ids[i * stride : i * stride + length] for i in range(count)])
