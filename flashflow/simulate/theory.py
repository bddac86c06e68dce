"""What may be claimed of step times (contract 10), and what the paper claims. Pure arithmetic.

Letters: N samples a step, K workers with one slot each, E epochs; mu_gen, mu_train realised mean seconds of a sample on
one worker, L_gen the longest one; beta share of the workers that train, alpha async ratio. All times in seconds.
"""

import math
from typing import NamedTuple


class Work(NamedTuple):
    """One step's."""

    samples: int
    """N."""
    workers: int
    """K."""
    epochs: int
    """E."""
    mean_generate_s: float
    """mu_gen."""
    mean_train_s: float
    """mu_train."""
    longest_generate_s: float
    """L_gen."""

    @property
    def generate_s(self) -> float:
        """N mu_gen / K: on all workers."""
        return self.samples * self.mean_generate_s / self.workers

    @property
    def train_s(self) -> float:
        """E N mu_train / K: on all workers."""
        return self.epochs * self.samples * self.mean_train_s / self.workers


def queue_bound(requests: int, workers: int, mean_s: float, longest_s: float) -> float:
    """T(Q) <= Q mu / K + L: Q requests by queue scheduling, whatever their order."""
    return requests * mean_s / workers + longest_s


def synchronous_bound(work: Work) -> float:
    """(N / K)(mu_gen + E mu_train) + L_gen."""
    return queue_bound(work.samples, work.workers, work.mean_generate_s, work.longest_generate_s) + work.train_s


def asynchronous_bound(work: Work, *, beta: float, alpha: float) -> float:
    """max{t, N mu_gen / ((1 - beta) K) + (L_gen + t) / (floor(alpha) + 1)}, t = E N mu_train / (beta K).

    With `on_stale: wait`, oldest first. The batch in training ages too, hence the t beside L_gen; at alpha 0 this is
    the sum of generation and training.
    """
    train_s = work.train_s / beta
    generate_s = work.generate_s / (1 - beta) + (work.longest_generate_s + train_s) / (math.floor(alpha) + 1)
    return max(train_s, generate_s)


def paper_bound(work: Work, *, beta: float, alpha: float) -> float:
    """The paper's, optimistic: max{t, N mu_gen / ((1 - beta) K) + L_gen / (alpha + 1)}."""
    return max(work.train_s / beta, work.generate_s / (1 - beta) + work.longest_generate_s / (alpha + 1))


class PaperSplit(NamedTuple):
    """A share beta and the step time that the paper's bound has there."""

    beta: float
    step_s: float


def paper_split(work: Work, alpha: float) -> PaperSplit:
    """The paper's closed form beta* = a / S, S = a + b + c, and its step time S.

    a = E N mu_train / K, b = N mu_gen / K, c = L_gen / (alpha + 1).
    """
    total = work.train_s + work.generate_s + work.longest_generate_s / (alpha + 1)
    return PaperSplit(work.train_s / total, total)


def paper_exact_split(work: Work, alpha: float) -> PaperSplit:
    """Where the two sides of the paper's bound are equal: beta = 2a / (S + sqrt(S^2 - 4ac))."""
    a, c = work.train_s, work.longest_generate_s / (alpha + 1)
    total = a + work.generate_s + c
    beta = 2 * a / (total + math.sqrt(total * total - 4 * a * c))
    return PaperSplit(beta, a / beta)
