"""The target's keys and values: preallocated rows of which the first `length` are committed text.

transformers' dynamic cache copies everything at each step and its static cache attends over its whole buffer;
here a forward appends its rows behind the committed ones, attention sees the live rows only, and a commit
moves the accepted rows to the front of what was appended. Nothing else moves:

    before     │ committed text │ root a b c d e │      a verify forward appended six rows
    accepted                      root   b     e        the walk
    after      │ committed text   root b e │            gather, then a shorter `length`

Rotary positions need no repair: a node sat at position `length + depth`, which is where it now stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["LiveCache"]


class _LiveLayer(CacheLayerMixin):
    """One layer's rows, [1, kv_heads, capacity, head_dim], allocated when the first ones arrive."""

    is_sliding = False
    is_croppable = True

    def __init__(self, owner: LiveCache) -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            torch.empty(*x.shape[:2], self._owner.capacity, x.shape[3], dtype=x.dtype, device=x.device)
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self._owner.length
        end = start + key_states.shape[2]
        assert end <= self._owner.capacity, f"cache of {self._owner.capacity} rows asked to hold {end}"
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._owner.length

    def get_max_length(self) -> int:
        return self._owner.capacity


class LiveCache(Cache):
    """A cache for one sequence (batch 1).

    Attributes:
        capacity: rows allocated.
        length: committed rows; a Python int, so reading it never stalls an accelerator.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        super().__init__(layers=[_LiveLayer(self) for _ in range(num_layers)])

    def commit(self, path: Tensor, count: int) -> None:
        """Keep `count` of the rows that the last forward appended, in the order given, and forget the others.

        Args:
            path: [≥ count] int64, row numbers relative to the first appended row, ascending.
            count: how many of them to keep.
        """
        start = self.length
        rows = start + path[:count]
        for layer in self.layers:
            if layer.is_initialized:  # layers that share another's keys never allocate their own
                index = rows.to(layer.keys.device, non_blocking=True)
                layer.keys[:, :, start : start + count] = layer.keys.index_select(2, index)
                layer.values[:, :, start : start + count] = layer.values.index_select(2, index)
        self.length = start + count

    def advance(self, count: int) -> None:
        """Commit the first `count` appended rows where they are: what a prefill or a straight path needs."""
        self.length += count

    def rows(self, end: int) -> list[Tensor] | None:
        """Each layer's keys and values, whole, with room for rows up to `end`; None before the first forward."""
        assert end <= self.capacity, f"cache of {self.capacity} rows asked to hold {end}"
        if not all(layer.is_initialized for layer in self.layers):
            return None
        return [rows for layer in self.layers for rows in (layer.keys, layer.values)]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.nbytes for layer in self.layers for t in (layer.keys, layer.values) if t is not None)
