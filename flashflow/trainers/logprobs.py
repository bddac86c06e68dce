"""Log-probabilities of given tokens under a transformers causal LM, without the logits of all tokens in memory.

Letters: B rows, T padded length, N selected tokens, C tokens of a chunk, D width of the model, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flashflow.errors import ConfigError
from flashflow.shapes import safe_rows
from flashflow.trainers.backbone import hidden_states, prepare

ROWS = safe_rows(1)
"""Tokens are scored in multiples of this many, so that a chunk of any size has a safe number of rows."""
LOGITS_PER_CHUNK = 1 << 25
"""Bounds C x V: 128 MiB in float32. The backward pass holds about four such."""


class TokenScorer(nn.Module):
    """The model from token ids to log-probabilities; the module to shard, so that its hooks see head and embedding.

    Same layers, attention kernel, explicit mask and row counts as the engine's, so its log-probabilities come out
    equal to the last bit where the engine's probe says `exact`.
    """

    def __init__(self, model: Any, temperature: float, logits_per_chunk: int = LOGITS_PER_CHUNK) -> None:
        """model: a transformers causal LM in float32, taken over. Raises ConfigError on a head that is not linear."""
        super().__init__()
        prepare(model)
        self.model = model
        self.temperature = temperature
        self._check_head()
        self.chunk = max(1, logits_per_chunk // model.get_output_embeddings().weight.shape[0] // ROWS) * ROWS

    @property
    def layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.model.base_model.layers
        return layers

    def forward(
        self, tokens_BT: torch.Tensor, mask_BT: torch.Tensor, *, entropy_gradient: bool = False, hidden: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """tokens_BT int64, padded on the right to a number of `safe_tokens`; mask_BT bool, false in column 0.

        Returns float32 [B, T] each, 0 outside the mask: the log-probability of token t given those before it, and the
        entropy in nats of the distribution it was drawn from, both at the sampling temperature; with `hidden` thirdly
        the hidden states [B, T, D] of the last layer, for a value head.
        """
        where = mask_BT.nonzero(as_tuple=True)
        places_N = where[0] * tokens_BT.shape[1] + where[1]
        num_selected = places_N.numel()
        padding = -num_selected % ROWS if num_selected else ROWS
        padded_N = F.pad(places_N, (0, padding), value=1)
        # Token t is predicted at t - 1; the padding is dropped again below.
        hidden_BTD = hidden_states(self.model.base_model, tokens_BT)
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, padded_N - 1)
        targets_N = tokens_BT.flatten().index_select(0, padded_N)
        logprobs_N, entropies_N = self._head(hidden_ND, targets_N, entropy_gradient)
        empty_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
        scores = (
            empty_BT.index_put(where, logprobs_N[:num_selected]),
            empty_BT.index_put(where, entropies_N[:num_selected]),
        )
        return (*scores, hidden_BTD) if hidden else scores

    def _head(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunks = []
        for hidden_CD, targets_C in zip(hidden_ND.split(self.chunk), targets_N.split(self.chunk), strict=True):  # type: ignore[no-untyped-call]
            if torch.is_grad_enabled():
                # Recomputed in the backward pass: only [C, D] is kept, never [C, V].
                scored = checkpoint(
                    self._score, hidden_CD, targets_C, entropy_gradient, use_reentrant=False, preserve_rng_state=False
                )
            else:
                scored = self._score(hidden_CD, targets_C, entropy_gradient)
            chunks.append(scored)
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(
        self, hidden_CD: torch.Tensor, targets_C: torch.Tensor, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_CV = self.model.get_output_embeddings()(hidden_CD).float()
        if self.temperature != 1:
            # By a tensor, as the engine does: a Python number may be turned into a product with its reciprocal.
            logits_CV = logits_CV / torch.full((1, 1), self.temperature, device=logits_CV.device)
        all_CV = torch.log_softmax(logits_CV, dim=-1)
        logprobs_C = all_CV.gather(-1, targets_C[:, None]).squeeze(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies_C = -(all_CV.exp() * all_CV).sum(dim=-1)
        return logprobs_C, entropies_C

    @torch.no_grad()
    def _check_head(self) -> None:
        """The head is applied apart from the model: right only if the model does nothing more to its logits."""
        device = self.model.get_output_embeddings().weight.device
        tokens_BT = torch.arange(ROWS, device=device)[None]
        expected = self.model(input_ids=tokens_BT, use_cache=False).logits.float()
        found = self.model.get_output_embeddings()(hidden_states(self.model.base_model, tokens_BT)).float()
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
            raise ConfigError([
                f"model.path: {type(self.model).__name__} transforms its logits after the head (soft cap or scale); "
                "the fsdp trainer supports plain linear heads"
            ])  # fmt: skip
