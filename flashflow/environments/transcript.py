"""The tokens of an attempt as it goes on, and at its end its arrays. Letters: T tokens so far."""

from typing import NamedTuple

import numpy as np

from flashflow.messages import GenerateReply
from flashflow.records import Float32Array, Int32Array, UInt8Array


class Arrays(NamedTuple):
    """As the fields of Trajectory with these names."""

    tokens_T: Int32Array
    mask_T: UInt8Array
    logprobs_T: Float32Array
    versions_T: Int32Array


class Transcript:
    def __init__(self) -> None:
        self.answers: list[GenerateReply] = []
        self.num_tokens = 0
        self._observations: list[Int32Array] = []

    def observe(self, token_ids: Int32Array) -> None:
        """What the policy reads next."""
        self._observations.append(token_ids)
        self.num_tokens += len(token_ids)

    def answer(self, answer: GenerateReply) -> None:
        """What the policy said to the last observation."""
        self.answers.append(answer)
        self.num_tokens += len(answer.token_ids)

    @property
    def tokens_T(self) -> Int32Array:
        """The next prompt."""
        if len(self._observations) == 1 and not self.answers:
            return self._observations[0]
        return np.concatenate([part for turn in self._turns() for part in turn])

    def arrays(self) -> Arrays:
        """Of whole turns."""
        mask, logprobs, versions = [], [], []
        for observation, answer in zip(self._observations, self.answers, strict=True):
            read, said = len(observation), len(answer.token_ids)
            mask += [np.zeros(read, np.uint8), np.ones(said, np.uint8)]
            logprobs += [np.zeros(read, np.float32), answer.logprobs]
            versions += [np.full(read, -1, np.int32), answer.versions]
        return Arrays(self.tokens_T, np.concatenate(mask), np.concatenate(logprobs), np.concatenate(versions))

    def _turns(self) -> list[tuple[Int32Array, ...]]:
        """The last one without an answer, while there is none."""
        whole = list(zip(self._observations, (answer.token_ids for answer in self.answers), strict=False))
        return [*whole, *((observation,) for observation in self._observations[len(whole) :])]
