"""From a prompt to the token ids the engine continues. The one place where prompts become tokens."""

from typing import TYPE_CHECKING, Any

from flashflow.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
"""Chat messages: role and content, as the chat template takes them."""


def render_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: str | Messages, system_prompt: str | None) -> list[int]:
    """Token ids of a prompt, up to where the assistant starts to write.

    With a chat template: its rendering (a string becomes a user message). Without: the text itself, after the system
    prompt and a blank line. A tokenizer that begins texts with a BOS gets exactly one, whether or not the template
    writes it. `system_prompt` goes before the messages, unless they begin with a system message of their own.

    Raises ConfigError for messages without a chat template, and for a template that refuses the messages.
    """
    text = _template_text(tokenizer, as_messages(prompt, system_prompt)) if tokenizer.chat_template else None
    if text is None:
        text = _plain_text(prompt, system_prompt)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    if _adds_bos(tokenizer) and ids[:1] != [bos]:
        return [bos, *ids]
    return ids


def as_messages(prompt: str | Messages, system_prompt: str | None) -> Messages:
    """The conversation a prompt opens."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system_prompt is None or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def prompt_text(prompt: str | Messages) -> str:
    """What was asked, for a reward function: the string, or the text of the last user message."""
    if isinstance(prompt, str):
        return prompt
    asked = [message["content"] for message in prompt if message["role"] == "user"]
    return _content_text(asked[-1]) if asked else ""


def _content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return str(content)


def _template_text(tokenizer: "PreTrainedTokenizerBase", messages: Messages) -> str:
    from jinja2.exceptions import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ConfigError([f"model.path: its chat template refuses {messages!r:.200}: {error}"]) from error
    return str(text)


def _plain_text(prompt: str | Messages, system_prompt: str | None) -> str:
    if not isinstance(prompt, str):
        remedy = "use a chat model, or make data.prompt_column a string"
        raise ConfigError([f"model.path: the tokenizer has no chat template for a list of messages; {remedy}"])
    return prompt if system_prompt is None else f"{system_prompt}\n\n{prompt}"


def _adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer.encode("", add_special_tokens=True)[:1] == [bos]
