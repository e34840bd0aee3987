"""The manifest: what holds for every token of an archive (docs/format.md §3). Nothing in it grows with the text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..errors import DamagedArchive, InvalidInput, InvalidRecipe, KVCellarError
from ..geometry import MAX_LAYERS, SLIDING, Geometry, LayerGeometry, SideGeometry
from ..identity import DIGEST, Identity, require_text
from ..recipe import Recipe, canonical_json, strict_json

MAX_NAMESPACE = 1024
_KEYS = {"geometry", "identity", "namespace", "profile", "recipe"}


@dataclass(frozen=True)
class Manifest:
    """Recipe, identity, geometry, namespace, and the id (64 hex digits) of the profile that decodes it, if any."""

    recipe: Recipe
    identity: Identity
    geometry: Geometry
    namespace: str = ""
    profile: str | None = None
    profile_embedded: bool = False

    def __post_init__(self) -> None:
        require_text(self.namespace, MAX_NAMESPACE, "namespace")

    def to_json(self) -> dict[str, Any]:
        profile = None if self.profile is None else {"id": self.profile, "embedded": self.profile_embedded}
        return {
            "geometry": self.geometry.to_json(),
            "identity": self.identity.to_json(),
            "namespace": self.namespace,
            "profile": profile,
            "recipe": self.recipe.to_json(),
        }

    def pack(self) -> bytes:
        """Raises InvalidInput for an identity of half a digest, which token logs alone keep."""
        try:
            _whole(self.identity)
        except ValueError as error:
            raise InvalidInput(str(error)) from error
        return canonical_json(self.to_json())

    @classmethod
    def unpack(cls, data: bytes) -> Manifest:
        """Raises DamagedArchive for anything but what `pack` writes; InvalidRecipe where only the recipe is new."""
        try:
            value = strict_json(data)
            if not isinstance(value, dict) or set(value) != _KEYS:
                raise ValueError(f"keys {sorted(value)[:16] if isinstance(value, dict) else value!r}")
            profile = value["profile"]
            return cls(
                recipe=Recipe.from_json(value["recipe"]),
                identity=_whole(Identity(**value["identity"])),
                geometry=_geometry(value["geometry"]),
                namespace=value["namespace"],
                profile=None if profile is None else _hex(profile["id"]),
                profile_embedded=profile is not None and profile["embedded"] is True,
            )
        except InvalidRecipe:
            raise
        except (ValueError, TypeError, KeyError, json.JSONDecodeError, KVCellarError) as error:
            raise DamagedArchive("manifest", f"unreadable ({error})") from error


def _whole(identity: Identity) -> Identity:
    if len(identity.digest) != DIGEST:
        raise ValueError(f"an identity digest of {len(identity.digest)} hex digits; an archive has {DIGEST}")
    return identity


def _hex(text: str) -> str:
    if len(text) != 64 or bytes.fromhex(text).hex() != text:
        raise ValueError(f"profile id {text!r}")
    return text


def _geometry(runs: list[dict[str, Any]]) -> Geometry:
    layers: list[LayerGeometry] = []
    for run in runs:
        count = run["layers"]
        if type(count) is not int or not 1 <= count <= MAX_LAYERS - len(layers):
            raise ValueError(f"a run of {count} layers")
        window = {"window"} if run["kind"] == SLIDING else set()
        if set(run) != {"layers", "kind", "key", "value"} | window or type(run.get("window", 0)) is not int:
            raise ValueError(f"layer kind {run.get('kind')!r} with keys {sorted(run)[:8]}")
        key, value = SideGeometry(**run["key"]), SideGeometry(**run["value"])
        layers += [LayerGeometry(key, value, run["kind"], run.get("window", 0))] * count
    return Geometry(tuple(layers))
