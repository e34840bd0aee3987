"""Who a cache belongs to. Restoring a cache into another model gives fluent nonsense, so it is refused by default.

An `Identity` is a SHA-256 digest: over a model's parameters and cache-shaping config (made by
`kvcellar.frontends.fingerprint.identity_of_model`), or over a name the caller chose. The two kinds never
compare equal. `frame` makes every hashed message injective: each field carries its tag and its length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .errors import IdentityMismatch, InvalidInput

MODEL, NAME = "model", "name"
MAX_LABEL = 4096
DIGEST, HALF = 64, 32
_HEX = frozenset("0123456789abcdef")


def frame(tag: str, fields: Iterable[bytes | str]) -> bytes:
    """`tag` and `fields` with their lengths, so that no two different lists give the same bytes."""
    out = []
    for item in (tag, *fields):
        raw = item.encode() if isinstance(item, str) else item
        out.append(len(raw).to_bytes(8, "little") + raw)
    return b"".join(out)


def require_text(text: object, limit: int | None, what: str) -> None:
    """Raise InvalidInput unless `text` is text that UTF-8 can write, of at most `limit` characters."""
    if not isinstance(text, str) or (limit is not None and len(text) > limit):
        raise InvalidInput(f"{what} must be text of at most {limit} characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{what} {text[:80]!r} cannot be written as UTF-8: {error.reason}") from error


@dataclass(frozen=True)
class Identity:
    """Digest (64 hex digits) of whatever a cache depends on; `label` is for people and takes no part in equality.

    Token logs keep the first half of a digest: `same` tells whether two stand for one, whole or half.
    """

    kind: str
    digest: str
    label: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in (MODEL, NAME):
            raise InvalidInput(f"identity kind {self.kind!r}; expected {MODEL!r} or {NAME!r}")
        if not isinstance(self.digest, str) or len(self.digest) not in (DIGEST, HALF) or not set(self.digest) <= _HEX:
            raise InvalidInput(f"identity digest {self.digest[:80]!r}; expected {DIGEST} lower-case hex digits")
        require_text(self.label, MAX_LABEL, "identity label")

    @classmethod
    def named(cls, name: str) -> Identity:
        """An identity from a name of the caller's choice; any non-empty text, told apart exactly."""
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"identity {name!r}; expected an Identity or a non-empty string")
        require_text(name, None, "identity")
        digest = hashlib.sha256(frame("kvcellar-identity-name/1", [name])).hexdigest()
        return cls(NAME, digest, name[:MAX_LABEL])

    @classmethod
    def of(cls, identity: Identity | str) -> Identity:
        return identity if isinstance(identity, cls) else cls.named(identity)  # type: ignore[arg-type]

    def same(self, other: Identity) -> bool:
        """Whether the two are of one kind, and their digests agree as far as both are known: 128 bits or more."""
        known = min(len(self.digest), len(other.digest))
        return self.kind == other.kind and self.digest[:known] == other.digest[:known]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "digest": self.digest, "label": self.label}

    def __str__(self) -> str:
        return f"{self.label or 'unnamed'} ({self.kind} {self.digest[:12]})"


def require_same(stored: Identity, given: Identity, where: str) -> None:
    """Raise IdentityMismatch with both sides unless `given` is the `stored` identity."""
    if not stored.same(given):
        raise IdentityMismatch(
            f"{where} belongs to another model: expected {stored}, got {given}. "
            "Pass allow_mismatch=True only if you know that the two compute the same cache."
        )
