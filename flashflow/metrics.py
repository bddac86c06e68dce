"""Figures of a step that follow from its manifest alone."""

from collections import Counter
from collections.abc import Sequence

from flashflow.records import Manifest, ManifestRow


def manifest_metrics(manifest: Manifest) -> dict[str, object]:
    """Ages of the fresh samples, what filters dropped since the batch before, and the replay slots apart."""
    replayed = [row for row in manifest.rows if row.use > 1]
    return {
        **staleness_metrics(manifest),
        "filtered_groups": manifest.num_filtered,
        "replay_groups": len({row.sample.group for row in replayed}),
        **(_replay_metrics(manifest, replayed) if replayed else {}),
    }


def staleness_metrics(manifest: Manifest) -> dict[str, object]:
    """Age of each fresh sample at hand-over: the trainer's version, step - 1, minus the version of its oldest token."""
    return _ages(manifest, [row for row in manifest.rows if row.use == 1])


def _replay_metrics(manifest: Manifest, rows: Sequence[ManifestRow]) -> dict[str, object]:
    """The same of replayed samples, their mean reward, and the mean number of times they were trained, this included.

    A batch has as many replay slots as groups that they replaced.
    """
    rewards = [row.reward for row in rows if row.reward is not None]
    metrics = {**_ages(manifest, rows), "uses_mean": sum(row.use for row in rows) / len(rows)}
    metrics["reward_mean"] = sum(rewards) / len(rewards) if rewards else 0.0
    return {f"replay_{name}": value for name, value in metrics.items()}


def _ages(manifest: Manifest, rows: Sequence[ManifestRow]) -> dict[str, object]:
    ages = [manifest.step - 1 - row.initiating_version for row in rows]
    return {
        "staleness_mean": sum(ages) / len(ages) if ages else 0.0,
        "staleness_max": max(ages, default=0),
        "staleness_histogram": {str(age): count for age, count in sorted(Counter(ages).items())},
    }
