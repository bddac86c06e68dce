import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from flashflow.data.chat import prompt_text, render_prompt
from flashflow.errors import ConfigError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS, EOS = 0, 1


def tokenizer(*, bos: bool = False, template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte; with `bos` it puts <s> before and </s> after a text, as Llama-like tokenizers do."""
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>" if bos else None, eos_token="</s>")
    fast.chat_template = template
    return fast


def rendered(tok: PreTrainedTokenizerFast, prompt, system_prompt=None) -> str:
    return tok.decode(render_prompt(tok, prompt, system_prompt))


def test_a_string_becomes_the_user_message_of_the_template():
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(tokenizer(template=CHATML), "hi") == expected


def test_messages_are_rendered_as_they_are():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    text = rendered(tokenizer(template=CHATML), messages)
    turns = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
    assert text == turns + "<|im_start|>assistant\n"


def test_the_system_prompt_comes_first():
    text = rendered(tokenizer(template=CHATML), "hi", "be brief")
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi")


def test_a_rows_own_system_message_stays_the_only_one():
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    text = rendered(tokenizer(template=CHATML), messages, "be brief")
    assert text.count("<|im_start|>system") == 1
    assert "own" in text


def test_without_a_template_the_text_is_encoded_plainly():
    assert rendered(tokenizer(), "hi") == "hi"
    assert rendered(tokenizer(), "hi", "be brief") == "be brief\n\nhi"


def test_plain_text_gets_the_tokenizers_bos_once_and_no_eos():
    ids = render_prompt(tokenizer(bos=True), "hi", None)
    assert ids[0] == BOS
    assert ids.count(BOS) == 1
    assert EOS not in ids


@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML])
def test_a_template_with_or_without_bos_gives_exactly_one(template):
    ids = render_prompt(tokenizer(bos=True, template=template), "hi", None)
    assert ids[0] == BOS
    assert ids.count(BOS) == 1
    assert EOS not in ids


def test_a_tokenizer_that_adds_no_bos_gets_none():
    assert BOS not in render_prompt(tokenizer(template=CHATML), "hi", None)


def test_messages_without_a_template_are_refused():
    with pytest.raises(ConfigError, match="no chat template for a list of messages"):
        render_prompt(tokenizer(), [{"role": "user", "content": "hi"}], None)


def test_a_template_that_refuses_the_messages_is_named():
    refusing = tokenizer(template="{{ raise_exception('system role not supported') }}")
    with pytest.raises(ConfigError, match=r"model.path: its chat template refuses .*system role not supported"):
        render_prompt(refusing, "hi", "be brief")


def test_the_text_of_a_prompt_is_the_last_user_message():
    assert prompt_text("hi") == "hi"
    assert prompt_text([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]) == "b"
    assert (
        prompt_text([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
        == "ab"
    )
