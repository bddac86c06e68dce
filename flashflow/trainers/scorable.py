"""Which samples count. Knows no torch."""

import math

from flashflow.records import ManifestRow


def is_scorable(row: ManifestRow) -> bool:
    """It has a usable reward; else it leaves baseline, numerator and denominator (it is masked out whole)."""
    return row.outcome != "failed" and row.reward is not None and math.isfinite(row.reward)
