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
        self._store = np.zeros(0, np.int32)
        """Room for more than the tokens so far: what is added moves nothing, and views stay right."""

    def observe(self, token_ids: Int32Array) -> None:
        """What the policy reads next."""
        self._observations.append(token_ids)
        self._add(token_ids)

    def answer(self, answer: GenerateReply) -> None:
        """What the policy said to the last observation."""
        self.answers.append(answer)
        self._add(answer.token_ids)

    @property
    def tokens_T(self) -> Int32Array:
        """The next prompt; a view."""
        return self._store[: self.num_tokens]

    def arrays(self) -> Arrays:
        """Of whole turns."""
        mask, logprobs, versions = [], [], []
        for observation, answer in zip(self._observations, self.answers, strict=True):
            read, said = len(observation), len(answer.token_ids)
            mask += [np.zeros(read, np.uint8), np.ones(said, np.uint8)]
            logprobs += [np.zeros(read, np.float32), answer.logprobs]
            versions += [np.full(read, -1, np.int32), answer.versions]
        return Arrays(self.tokens_T, np.concatenate(mask), np.concatenate(logprobs), np.concatenate(versions))

    def _add(self, token_ids: Int32Array) -> None:
        end = self.num_tokens + len(token_ids)
        if end > len(self._store):
            grown = np.empty(max(end, 2 * len(self._store)), np.int32)
            grown[: self.num_tokens] = self.tokens_T
            self._store = grown
        self._store[self.num_tokens : end] = token_ids
        self.num_tokens = end
