"""What samples of some problems say about all problems. Pure; free of torch."""

import math
from collections.abc import Sequence


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Probability that at least one of k samples of a problem solves it, from n >= k of which c do:

        1 - C(n - c, k) / C(n, k)

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), equation 1. Whole numbers, so nothing overflows.
    Raises ValueError when k is not in 1 .. n, or c not in 0 .. n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_solved <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples, {num_solved} of them solved, means nothing")
    return 1 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of independent values, the population being unlimited; None for fewer than two.

    Problems are independent, samples of one problem are not: one value per problem goes in (Miller 2024,
    arXiv 2411.00640, section 2.2, in the form of equal clusters).
    """
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))
