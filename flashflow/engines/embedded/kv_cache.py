"""Keys and values of the running requests, one slot each, at fixed addresses.

Letters: L layers, S slots, H key/value heads, T time, D head dimension.
"""

import torch


class SlotCache:
    """[L, 2, S, H, T, D]; what lies beyond a slot's own tokens is finite rubbish that every mask hides."""

    def __init__(
        self, *, num_layers: int, slots: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        shape = (num_layers, 2, slots, kv_heads, length, head_dim)
        # Zeros, not empty: a masked weight of 0 times a NaN left in memory would be NaN.
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [(layer[0], layer[1]) for layer in self._data]
        self._rows = torch.arange(slots, device=device)

    @property
    def slots(self) -> int:
        return self._data.shape[2]

    @property
    def length(self) -> int:
        return self._data.shape[4]

    def write_prompt(self, layer: int, slot: int, keys_HTD: torch.Tensor, values_HTD: torch.Tensor) -> None:
        """Positions 0 .. T - 1 of one slot."""
        keys_SHTD, values_SHTD = self._layers[layer]
        num_tokens = keys_HTD.shape[1]
        keys_SHTD[slot, :, :num_tokens] = keys_HTD
        values_SHTD[slot, :, :num_tokens] = values_HTD

    def write_tokens(
        self, layer: int, positions_S: torch.Tensor, keys_SHD: torch.Tensor, values_SHD: torch.Tensor
    ) -> None:
        """One position of each of the first len(positions_S) slots."""
        keys_SHTD, values_SHTD = self._layers[layer]
        rows_S = self._rows[: positions_S.shape[0]]
        keys_SHTD[rows_S, :, positions_S] = keys_SHD
        values_SHTD[rows_S, :, positions_S] = values_SHD

    def view(self, layer: int, first_slot: int, num_slots: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_slots, H, length, D], without a copy."""
        keys_SHTD, values_SHTD = self._layers[layer]
        chosen = slice(first_slot, first_slot + num_slots)
        return keys_SHTD[chosen, :, :length], values_SHTD[chosen, :, :length]

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """The first tokens of slot `source` to slot `target`."""
        self._data[:, :, target, :, :num_tokens] = self._data[:, :, source, :, :num_tokens]
