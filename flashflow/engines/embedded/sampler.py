"""Sampling by inverse cumulative distribution at keyed uniforms; every row by itself.

Letters: N rows, V vocabulary, C blocks of it, K tokens of a block.
"""

import torch
import torch.nn.functional as F

BLOCK = 128
"""K."""
WHOLE = 1024
"""Up to here a vocabulary is one block (measured: blocks take 1.3 x the time at 512 tokens, half of it at 4,096)."""


class Sampler(torch.nn.Module):
    """One token per row and its log-probability.

    Token = the first whose cumulative probability exceeds u times their total, probabilities being
    exp(log_softmax(logits / temperature)) in float32. Sums are float64, but for those of whole blocks before the
    token's own: a cumulative sum over the vocabulary is never made.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._one_block = vocab_size <= WHOLE
        self._overhang = -vocab_size % BLOCK

    def forward(
        self, logits_NV: torch.Tensor, uniforms_N: torch.Tensor, temperatures_N: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """uniforms_N: float64 [N] in [0, 1). temperatures_N: float32 [N], 0 = greedy with the log-probability at
        temperature 1; None: all 1.

        Returns int64 [N] and float32 [N]; the log-probability is NaN where the logits are not finite.
        """
        logits_NV = logits_NV.float()
        if temperatures_N is not None:
            divisors_N1 = torch.where(temperatures_N > 0, temperatures_N, 1.0)[:, None]
            logits_NV = logits_NV / divisors_N1
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        tokens_N1 = self._draw(logprobs_NV.exp(), uniforms_N[:, None])
        if temperatures_N is not None:
            greedy_N1 = logprobs_NV.argmax(dim=-1, keepdim=True)
            tokens_N1 = torch.where(temperatures_N[:, None] > 0, tokens_N1, greedy_N1)
        return tokens_N1[:, 0], logprobs_NV.gather(1, tokens_N1)[:, 0]

    def _draw(self, probabilities_NV: torch.Tensor, uniforms_N1: torch.Tensor) -> torch.Tensor:
        if self._one_block:
            cumulative_NV = probabilities_NV.cumsum(dim=-1, dtype=torch.float64)
            return _first_above(cumulative_NV, uniforms_N1 * cumulative_NV[:, -1:])[0]
        if self._overhang:
            probabilities_NV = F.pad(probabilities_NV, (0, self._overhang))
        blocks_NCK = probabilities_NV.view(probabilities_NV.shape[0], -1, BLOCK)
        cumulative_NC = blocks_NCK.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        block_N1, threshold_N1 = _first_above(cumulative_NC, uniforms_N1 * cumulative_NC[:, -1:])
        before_N1 = F.pad(cumulative_NC, (1, 0)).gather(1, block_N1)
        inside_NK = blocks_NCK.gather(1, block_N1[:, :, None].expand(-1, -1, BLOCK))[:, 0]
        place_N1, _ = _first_above(inside_NK.cumsum(dim=-1, dtype=torch.float64), threshold_N1 - before_N1)
        return block_N1 * BLOCK + place_N1


def _first_above(cumulative_NX: torch.Tensor, threshold_N1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the first sum above the threshold, and the threshold, which stays below the last sum.

    For u * total may round up to the total, which no sum exceeds.
    """
    total_N1 = cumulative_NX[:, -1:]
    threshold_N1 = torch.minimum(threshold_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1)))
    index_N1 = torch.searchsorted(cumulative_NX, threshold_N1, right=True)
    # Only rows without a finite total can still point past the end; then any index will do.
    return index_N1 % cumulative_NX.shape[1], threshold_N1
