"""Inference engines. Importing this package imports no torch; making an engine may."""

from typing import Any

from flashflow.config.sections import TorchEngineSection
from flashflow.engines.base import Engine


def make_engine(section: TorchEngineSection, model: Any, tokenizer: Any = None) -> Engine:
    """The embedded engine.

    model: a transformers causal LM (flashflow.models.load_model), taken over. tokenizer: for stop strings.
    Raises ConfigError when the engine cannot keep what the section promises.
    """
    from flashflow.engines.embedded.engine import TorchEngine

    return TorchEngine(
        model,
        slots=section.slots,
        max_context_tokens=section.max_context_tokens,
        tokenizer=tokenizer,
        batch_invariant=section.batch_invariant,
    )
