"""One forward and backward pass of the trainer on sequences of 200 tokens: padded to 208 with keys to 512, against
padded to 512 throughout; and what it keeps in memory with recomputed layers.

    python -m benchmarks.trainer_pass

Prints one table and appends it, with command, commit and machine, to results/trainer_pass.jsonl. The cases take turns
within the run; seconds are medians, of the CPU, on one thread.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.record import commit, machine
from flashflow.shapes import safe_length, safe_tokens
from flashflow.trainers.backbone import recompute
from flashflow.trainers.logprobs import TokenScorer

RESULTS = Path(__file__).resolve().parent / "results" / "trainer_pass.jsonl"
TOKENS, PROMPT = 200, 40
CASES = {
    "padded to 208": (safe_tokens(TOKENS), False),
    "padded to 512": (safe_length(TOKENS), False),
    "padded to 208, recomputed": (safe_tokens(TOKENS), True),
}


def make_scorer(*, recomputed: bool) -> TokenScorer:
    """8.9 M parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    scorer = TokenScorer(Qwen3ForCausalLM(config), 1.0)
    if recomputed:
        recompute(scorer.layers)
    return scorer


def run(scorer: TokenScorer, length: int, rows: int) -> tuple[float, int]:
    """(CPU seconds of one thread, bytes kept from forward to backward besides the parameters)."""
    tokens = torch.randint(0, 4096, (rows, length), generator=torch.Generator().manual_seed(1))
    places = torch.arange(length).expand(rows, length)
    mask = (places >= PROMPT) & (places < TOKENS)
    own = {parameter.untyped_storage().data_ptr() for parameter in scorer.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    started = time.process_time()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = scorer(tokens, mask)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    seconds = time.process_time() - started
    scorer.zero_grad(set_to_none=True)
    return seconds, sum(kept.values())


def measure(rows: int, repeats: int) -> dict[str, dict[str, float]]:
    scorers = {recomputed: make_scorer(recomputed=recomputed) for recomputed in (False, True)}
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    kept: dict[str, int] = {}
    for repeat in range(repeats + 1):
        for name, (length, recomputed) in CASES.items():
            taken, kept[name] = run(scorers[recomputed], length, rows)
            if repeat:  # the first warms up
                seconds[name].append(taken)
    return {name: {"seconds": statistics.median(seconds[name]), "kept_mib": kept[name] / 2**20} for name in CASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(chosen.rows, chosen.repeats)
    base = found["padded to 208"]
    print("| sequences of 200 tokens | CPU seconds | against 208 | kept, MiB |\n|---|---|---|---|")
    for name, row in found.items():
        print(f"| {name} | {row['seconds']:.3f} | {row['seconds'] / base['seconds']:.2f} | {row['kept_mib']:.1f} |")
    record: dict[str, Any] = {
        "command": f"python -m benchmarks.trainer_pass {' '.join(sys.argv[1:])}".strip(),
        "commit": commit(), "machine": machine(), "rows": chosen.rows, "cases": found,
    }  # fmt: skip
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
