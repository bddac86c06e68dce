"""A checksum of a tensor's bits that every device computes alike: integer addition does not depend on its order."""

import torch

MODULUS = 2**63
CHUNK_WORDS = 1 << 22
"""int32 words summed at once: torch widens the summand to int64 in a temporary, which this bounds to 32 MiB."""


def digest(tensor: torch.Tensor) -> int:
    """Sum of the little-endian int32 view, the tail zero-padded, modulo 2**63. Any shape, dtype and device."""
    if not tensor.numel():
        return 0
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = raw.numel() // 4 * 4
    words = raw[:whole].view(torch.int32)
    total = words.new_zeros((), dtype=torch.int64)
    for start in range(0, words.numel(), CHUNK_WORDS):
        total += words[start : start + CHUNK_WORDS].sum(dtype=torch.int64)
    tail = int.from_bytes(bytes(raw[whole:].tolist()), "little")
    return (int(total) + tail) % MODULUS
