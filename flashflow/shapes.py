"""Shapes for which linear algebra gives the same bits, so that engine and trainer agree to the last one.

Libraries choose another order of summation for other shapes. Measured on CPU in float32 (MKL 2024.2, one thread, AVX2
and AVX-512 machines): rows of a product do not see how many other rows there are once there are 16 and the number is a
multiple of 8; attention's sum over keys is the same for every key length that is a multiple of 16 up to 128; beyond,
keys are cut in blocks of 512 and the result depends on the width of the last one. Widths 64, 128 and 512 agree on every
machine tried (256 only on the AVX-512 one, 384 only on the AVX2 one).
These are habits, not promises: the engine's start-up probe checks them (engines/embedded/probe.py).
"""

_LAST_BLOCK = (64, 128, 512)


def safe_rows(count: int) -> int:
    """The smallest number of rows >= count that a matrix product may have: 16, 24, 32, ..."""
    return max(16, _round_up(count, 8))


def safe_tokens(num_tokens: int) -> int:
    """The smallest number of queries one sequence may have in a pass whose key length is safe: multiples of 16."""
    return max(16, _round_up(num_tokens, 16))


def cache_length(num_tokens: int) -> int:
    """The shortest key length a decode step may use for `num_tokens` keys: {64, 128, 512} + 512 k."""
    whole, rest = divmod(max(1, num_tokens) - 1, 512)
    return whole * 512 + next(width for width in _LAST_BLOCK if rest < width)


def safe_length(num_tokens: int) -> int:
    """The shortest key length of a pass over that many tokens at once: multiples of 16, past 128 `cache_length`."""
    return safe_tokens(num_tokens) if num_tokens <= 128 else cache_length(num_tokens)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
