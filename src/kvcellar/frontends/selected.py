"""The layer of a restored transformers cache that holds fewer keys than positions. Importing it imports transformers.

Tried on: CPU, transformers 5.24.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class SelectedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys of selected positions; `logical_length` counts all positions, held or not."""

    is_croppable = False

    def __init__(self, logical_length: int):
        super().__init__()
        self.logical_length = logical_length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.logical_length += key_states.shape[-2]
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values

    def reset(self) -> None:
        super().reset()
        self.logical_length = 0

    def get_seq_length(self) -> int:
        return self.logical_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = self.keys.shape[-2] if self.is_initialized else 0
        return held + query_length, self.logical_length - held
