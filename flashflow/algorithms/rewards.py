"""Shaping of rewards. Free of torch."""

from flashflow.errors import ConfigError


def overlong_penalty(num_tokens: int, *, budget: int, cache: int) -> float:
    """Soft penalty of long responses, in [-1, 0], to be added to the reward (DAPO 2503.14476 eq. 13).

    With L = budget and c = cache, in tokens: 0 if n <= L - c; ((L - c) - n)/c inside the cache; -1 beyond L. DAPO's are
    20480 and 4096. Filters, the TOPR sign and the replay buffer look at the reward without it.
    """
    if not 0 < cache <= budget:
        raise ConfigError([f"overlong cache = {cache} must be in 1 .. budget = {budget}"])
    return max(-1.0, min(0.0, (budget - cache - num_tokens) / cache))
