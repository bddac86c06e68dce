"""Continuous batching over one model: a request joins and leaves between any two decode steps.

    waiting --place--> slot: prefill all tokens but the last --step--> token, token, ... --> free slot

The last known token always goes through a decode step, so the first new token of a fresh request, of one that lost its
engine, and of one in mid-answer come from the same computation: the samples are equal, too.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from flashflow.engines.base import EngineLimits, FinishReason, Sampled
from flashflow.engines.embedded import probe, weights
from flashflow.engines.embedded.placing import Placing
from flashflow.engines.embedded.runner import Runner
from flashflow.engines.embedded.sampler import Sampler
from flashflow.engines.embedded.slots import Running, Slots
from flashflow.engines.embedded.stops import Decoder, StopStrings
from flashflow.engines.embedded.traced import Traced
from flashflow.engines.uniform import uniforms
from flashflow.errors import ConfigError, ContractError
from flashflow.messages import Generate


class TorchEngine:
    """Implements `Engine`. One thread calls everything."""

    def __init__(
        self, model: Any, *, slots: int, max_context_tokens: int, tokenizer: Decoder | None = None,
        batch_invariant: bool = False, kv_cache_bytes: int | None = None, traced: bool = True,
    ) -> None:  # fmt: skip
        """model: a transformers causal LM, which the engine takes over. tokenizer: needed for stop strings only.
        kv_cache_bytes: of running requests' keys and values together; None: what the slots need at the longest context.
        traced: replay passes where that gives the same bits.

        Raises ConfigError when the model cannot be served, or `batch_invariant` is asked for and the probe finds that
        this machine's arithmetic is not.
        """
        self.limits = EngineLimits(slots=slots, max_context_tokens=max_context_tokens)
        self._tokenizer = tokenizer
        self._runner = Runner(model, slots, max_context_tokens, kv_cache_bytes, traced)
        differences = probe.differences(self._runner, slots, max_context_tokens)
        if differences and batch_invariant:
            raise ConfigError([f"engine.batch_invariant: true, but on this machine {text}" for text in differences])
        self._exact = not differences
        self._version = -1
        self._slots = Slots(slots)
        self._placing = Placing(self._runner, self._slots)
        sampler, traced = Sampler(self._runner.vocab_size), self._runner.traceable
        self._sample = Traced("sampling at temperature 1", sampler, traced)
        self._sample_tempered = Traced("sampling", sampler, traced)
        self._waiting: deque[Generate] = deque()
        self._by_name: dict[str, Running | None] = {}
        """Every request that has not ended; None while it waits."""
        self._ended: list[Sampled] = []

    @property
    def version(self) -> int:
        return self._version

    @property
    def exact(self) -> bool:
        return self._exact

    @property
    def num_running(self) -> int:
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Generate) -> None:
        """Queue a request, `generated_ids` being part of its budget.

        Raises ContractError when it cannot be served as it is.
        """
        mistake = self._mistake(request)
        if mistake:
            raise ContractError(f"request {request.request}: {mistake}")
        self._by_name[request.request] = None
        self._waiting.append(request)

    def abort(self, request: str) -> None:
        """Free its slot now; the next `step` reports the end."""
        if request not in self._by_name:
            return
        running = self._by_name[request]
        if running is None:
            self._waiting = deque(waiting for waiting in self._waiting if waiting.request != request)
            del self._by_name[request]
        else:
            self._release(running)
        self._ended.append(Sampled(request, -1, 0.0, self._version, "aborted"))

    @torch.inference_mode()
    def step(self) -> list[Sampled]:
        """Admit, then sample one token for every running request."""
        news, self._ended = self._ended, []
        while self._waiting and self._placing.make_room(self._waiting[0]):
            self._place(self._waiting.popleft())
        self._placing.settle()
        if not len(self._slots):
            return news
        self._placing.compact(self._slots.num_rows)
        return news + self._decode(self._slots.num_rows)

    def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keys and values of running requests are kept; every token says which version sampled it."""
        weights.swap(self._runner.model, tensors)
        self._version = version
        self._placing.prefixes.clear()

    def _mistake(self, request: Generate) -> str:
        sequence = np.concatenate([request.prompt_ids, request.generated_ids])
        limit, asked = self.limits.max_context_tokens, len(request.prompt_ids) + request.max_new_tokens
        if self._version < 0:
            return "the engine has no weights yet"
        if request.request in self._by_name:
            return "the id is in use"
        if not len(request.prompt_ids):
            return "prompt_ids is empty"
        if asked > limit:
            return f"prompt and max_new_tokens are {asked} tokens, engine.max_context_tokens is {limit}"
        if request.max_new_tokens <= len(request.generated_ids):
            return f"max_new_tokens {request.max_new_tokens} is used up by {len(request.generated_ids)} generated_ids"
        if sequence.min() < 0 or sequence.max() >= self._runner.vocab_size:
            return f"a token lies outside the vocabulary 0 .. {self._runner.vocab_size - 1}"
        if not (request.temperature >= 0 and math.isfinite(request.temperature)):
            return f"temperature {request.temperature} is negative or not finite"
        if "" in request.stop_strings:
            return "a stop string is empty"
        if request.stop_strings and self._tokenizer is None:
            return "stop strings need an engine with a tokenizer"
        return ""

    def _place(self, request: Generate) -> None:
        stops = None
        if request.stop_strings:
            stops = StopStrings(request.stop_strings, cast(Decoder, self._tokenizer), request.generated_ids.tolist())
        running = self._by_name[request.request] = Running(request, stops)
        self._placing.place(running, request)

    def _decode(self, num_rows: int) -> list[Sampled]:
        slots = self._slots
        logits = self._runner.decode(slots.tokens_S[:num_rows], slots.positions_S[:num_rows], slots.slots_S[:num_rows])
        num_rows = len(logits)
        drawn = torch.from_numpy(uniforms(slots.keys_S[:num_rows], slots.draws_S[:num_rows])).to(logits.device)
        temperatures = slots.temperatures_S[:num_rows]
        if (temperatures == 1).all():
            tokens, logprobs = self._sample(num_rows, logits, drawn)
        else:
            tempered = torch.from_numpy(temperatures).to(logits.device)
            tokens, logprobs = self._sample_tempered(num_rows, logits, drawn, tempered)
        tokens_N = tokens.cpu().numpy()
        slots.advance(num_rows, tokens_N)
        return self._record(tokens_N.tolist(), logprobs.tolist())

    def _record(self, tokens_N: list[int], logprobs_N: list[float]) -> list[Sampled]:
        news = []
        for running, token, logprob in zip(self._slots.running, tokens_N, logprobs_N, strict=False):
            if running is None:
                continue
            if math.isnan(logprob):
                raise ContractError(
                    f"request {running.name}: logits at version {self._version} are not finite; the weights diverged"
                )
            reason = cast(FinishReason, running.finish_reason_after(token))
            news.append(Sampled(running.name, token, logprob, self._version, reason))
            if reason:
                self._release(running)
        return news

    def _release(self, running: Running) -> None:
        self._slots.release(running.slot)
        del self._by_name[running.name]
