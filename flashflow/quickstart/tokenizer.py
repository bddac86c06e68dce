"""The quickstart's tokenizer: byte-level BPE trained on a few hundred sums, one token per digit, ChatML."""

from itertools import islice

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flashflow.quickstart.recipe import Recipe
from flashflow.quickstart.task import training_problems, worked

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS_SEED = 1
CORPUS_PROBLEMS = 400
MIN_FREQUENCY = 10


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """The same for every seed of the model. Digits stay apart, so that a column is a few tokens, always the same."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.max_vocab,
        min_frequency=MIN_FREQUENCY,
        show_progress=False,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_corpus(recipe), trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _corpus(recipe: Recipe) -> list[str]:
    problems = islice(training_problems(recipe, CORPUS_SEED), CORPUS_PROBLEMS)
    sums = [f"{problem['question']} {worked(problem['metadata']['expression'])}" for problem in problems]
    return sums + ["user\n", "assistant\n"] * 50
