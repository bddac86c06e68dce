"""Figures of a step that follow from its manifest alone."""

from collections import Counter

from flashflow.records import Manifest


def staleness_metrics(manifest: Manifest) -> dict[str, object]:
    """Age of each sample at hand-over: the trainer's version, step - 1, minus the version of its oldest token."""
    ages = [manifest.step - 1 - row.initiating_version for row in manifest.rows]
    return {
        "staleness_mean": sum(ages) / len(ages),
        "staleness_max": max(ages),
        "staleness_histogram": {str(age): count for age, count in sorted(Counter(ages).items())},
    }
