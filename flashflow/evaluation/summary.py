"""Transcripts in, figures out. Pure; free of torch."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from flashflow.evaluation.estimators import pass_at_k, standard_error
from flashflow.evaluation.transcripts import Transcript


class Estimate(msgspec.Struct, frozen=True):
    """A mean over problems."""

    name: str
    value: float
    error: float | None
    """Standard error over problems; None for a single problem."""


class Summary(msgspec.Struct, frozen=True):
    num_problems: int
    samples: int
    """Per problem."""
    estimates: list[Estimate]
    """`average` (mean reward) first, then `pass@k` for each k."""
    mean_response_tokens: float
    truncated_share: float
    """Of the samples, ended by max_new_tokens."""
    num_unscored: int
    """Samples without a reward; they count as 0, as they do in a run's own evaluations."""


def summarise(transcripts: Sequence[Transcript], ks: Sequence[int], threshold: float) -> Summary:
    """Every problem has the same number of samples. A sample is solved when its reward is at least `threshold`."""
    by_problem: dict[int, list[float]] = defaultdict(list)
    for transcript in transcripts:
        by_problem[transcript.problem].append(transcript.reward if transcript.reward is not None else 0.0)
    rewards = list(by_problem.values())
    samples = len(rewards[0])
    averages = [sum(values) / samples for values in rewards]
    solved = [sum(value >= threshold for value in values) for values in rewards]
    return Summary(
        num_problems=len(rewards),
        samples=samples,
        estimates=[
            _estimate("average", averages),
            *(_estimate(f"pass@{k}", [pass_at_k(samples, count, k) for count in solved]) for k in ks),
        ],
        mean_response_tokens=_mean([transcript.num_tokens for transcript in transcripts]),
        truncated_share=_mean([transcript.finish_reason == "length" for transcript in transcripts]),
        num_unscored=sum(transcript.reward is None for transcript in transcripts),
    )


def _estimate(name: str, values: Sequence[float]) -> Estimate:
    return Estimate(name, _mean(values), standard_error(values))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
