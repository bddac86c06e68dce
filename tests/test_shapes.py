"""Safe shapes, by a table. That they are safe is tested with the engine (tests/engines/test_torch_engine.py)."""

import pytest

from flashflow.shapes import cache_length, safe_length, safe_rows, safe_tokens


@pytest.mark.parametrize(
    ("count", "rows", "tokens", "cache", "length"),
    [
        (0, 16, 16, 64, 16),
        (1, 16, 16, 64, 16),
        (16, 16, 16, 64, 16),
        (17, 24, 32, 64, 32),
        (64, 64, 64, 64, 64),
        (65, 72, 80, 128, 80),
        (128, 128, 128, 128, 128),
        (129, 136, 144, 512, 512),
        (512, 512, 512, 512, 512),
        (513, 520, 528, 576, 576),
        (577, 584, 592, 640, 640),
        (641, 648, 656, 1024, 1024),
    ],
)
def test_safe_shapes(count, rows, tokens, cache, length):
    assert (safe_rows(count), safe_tokens(count), cache_length(count), safe_length(count)) == (
        rows,
        tokens,
        cache,
        length,
    )
