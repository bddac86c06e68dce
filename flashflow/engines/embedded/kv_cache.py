"""Keys and values of the running requests, one slot each, in a pool that is allocated once and never grows.

Letters: L layers, P tokens of the pool, N rows, S slots, H key/value heads, T time, D head dimension.
"""

from typing import NamedTuple

import numpy as np
import torch

from flashflow.engines.uniform import Int64Array


class CacheShape(NamedTuple):
    """What a token needs."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class SlotCache:
    """P tokens as slots of one length: `resize` trades number for length.

    What lies beyond a slot's own tokens is finite rubbish that every mask hides.
    """

    def __init__(self, shape: CacheShape, num_tokens: int, length: int, device: torch.device) -> None:
        """num_tokens: P, the last of which is scratch. length: of a slot, to begin with."""
        layers, heads, head_dim, dtype = shape
        # Zeros, not empty: a masked weight of 0 times a NaN left in memory would be NaN.
        self._pool = torch.zeros(2 * layers, num_tokens * heads, head_dim, dtype=dtype, device=device)
        self.rows = tuple(self._pool)
        """[P H, D] keys, then values, layer by layer; which row is whose is said by `places`."""
        self._heads, self._num_tokens = heads, num_tokens - 1
        self._lay_out(length)

    @property
    def num_bytes(self) -> int:
        return self._pool.nbytes

    @property
    def slots(self) -> int:
        return self.slots_of(self.length)

    def slots_of(self, length: int) -> int:
        """How many slots of that length there may be."""
        return self._num_tokens // length

    def resize(self, length: int, num_slots: int, num_cached: int) -> None:
        """Another length; of the first `num_slots` the first `num_cached` tokens are kept.

        Needs as much memory as one layer's keys of these tokens while it lasts.
        """
        old = self._slots
        self._lay_out(length)
        for source, target in zip(old, self._slots, strict=True):
            target[:num_slots, :, :num_cached] = source[:num_slots, :, :num_cached].clone()

    def places(self, slots_N: Int64Array, positions_NT: Int64Array) -> torch.Tensor:
        """Rows of `rows`, [N T H] flat, for the heads of some positions of some slots; slot -1 is scratch."""
        first_NT = slots_N[:, None] * (self._heads * self.length) + positions_NT
        places_NTH = first_NT[:, :, None] + self._head_offsets_H
        places_NTH[slots_N < 0] = self._num_tokens * self._heads
        return torch.from_numpy(places_NTH.reshape(-1)).to(self._pool.device)

    def views(self, num_slots: int, length: int) -> tuple[torch.Tensor, ...]:
        """[S, H, T, D] as `rows` are ordered, of the first slots and positions, without a copy."""
        views = self._views.get((num_slots, length))
        if views is None:
            views = tuple(self._slots[:, :num_slots, :, :length])
            self._views[num_slots, length] = views
        return views

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """The first tokens of slot `source` to slot `target`."""
        self._slots[:, target, :, :num_tokens] = self._slots[:, source, :, :num_tokens]

    def _lay_out(self, length: int) -> None:
        self.length = length
        used = self._pool[:, : self.slots * length * self._heads]
        self._slots = used.view(len(self._pool), self.slots, self._heads, length, -1)
        self._head_offsets_H = np.arange(self._heads, dtype=np.int64) * length
        self._views: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
