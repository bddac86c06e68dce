"""A tiny random model with its tokenizer, as a Hugging Face folder: what a test uses where a real one would be."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """259 tokens, one per byte and three special ones: pad `<|endoftext|>` 0, `<|im_start|>` 1, eos `<|im_end|>` 2."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(
    folder: Path,
    *,
    tied: bool = True,
    seed: int = 0,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    intermediate: int = 64,
    max_positions: int = 256,
    initializer_range: float = 0.1,
) -> Path:
    """Write a random Qwen3 of about 30,000 parameters (float32) and its tokenizer into `folder`, and return it.

    The same arguments give the same weights bit for bit; the caller's random state is left alone.
    """
    import torch
    from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        initializer_range=initializer_range,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
