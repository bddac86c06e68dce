"""A function of tensors, replayed as the flat list of tensor operations that one call of it made.

The same operations in the same order, so the same bits, without the Python between them, which takes most of a decode
step of a small model. What a trace cannot repeat (a branch on a value, another set of shapes) is found by comparing it
with the function at the first call of every set of shapes; from a difference on, the function itself is called.
"""

import logging
import warnings
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch.jit._trace import TracerWarning

trace: Any = torch.jit.trace
logger = logging.getLogger(__name__)

Outputs = torch.Tensor | tuple[torch.Tensor, ...]


class Traced:
    """Call under `torch.inference_mode`. The function may write to its inputs what it writes again when repeated."""

    def __init__(self, name: str, function: torch.nn.Module, enabled: bool = True) -> None:
        self._name, self._function, self._enabled = name, function, enabled
        self._script: Any = None
        self._checked: set[Hashable] = set()

    @property
    def enabled(self) -> bool:
        return self._enabled

    def __call__(self, shapes: Hashable, *inputs: Any) -> Outputs:
        """shapes: stands for those of the inputs. inputs: tensors, and tuples of them."""
        if not self._enabled:
            outputs: Outputs = self._function(*inputs)
            return outputs
        if shapes in self._checked:
            replayed: Outputs = self._script(*inputs)
            return replayed
        return self._check(shapes, inputs)

    def _check(self, shapes: Hashable, inputs: tuple[Any, ...]) -> Outputs:
        if self._script is None:
            self._script = self._trace(inputs)
        replayed = self._script(*inputs) if self._enabled else None
        outputs: Outputs = self._function(*inputs)
        if replayed is not None and not _same(replayed, outputs):
            self._give_up("its result differs")
        self._checked.add(shapes)
        return outputs

    def _trace(self, inputs: tuple[Any, ...]) -> Any:
        try:
            with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                script = trace(self._function, inputs, check_trace=False)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            self._give_up(str(error).strip().partition("\n")[0])
            return None
        for warning in caught:
            if issubclass(warning.category, TracerWarning) and warning.filename != F.__file__:
                self._give_up(f"{warning.filename}, line {warning.lineno}, depends on a value")
                break
        return script

    def _give_up(self, reason: str) -> None:
        self._enabled = False
        logger.warning("%s runs without a trace, slower on small models: %s", self._name, reason)


def _same(replayed: Outputs, outputs: Outputs) -> bool:
    if isinstance(outputs, torch.Tensor):
        replayed, outputs = (replayed,), (outputs,)  # type: ignore[assignment]
    # As bytes a NaN equals itself: diverged weights are no fault of the trace.
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(replayed, outputs, strict=True))
