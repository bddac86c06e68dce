"""Swap a model's weights whole."""

from collections.abc import Mapping
from typing import Any

import torch

from flashflow.errors import WeightsError


def swap(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Point every parameter at its new tensor; tied parameters are one parameter under its first name, and follow.

    A tensor on another device is copied into place instead. Raises WeightsError, before anything changed, on a
    missing, unknown or misshapen name or another dtype.
    """
    parameters = dict(model.named_parameters())
    mistakes = _mistakes(parameters, tensors)
    if mistakes:
        raise WeightsError("weights do not fit the engine's model, nothing was changed: " + "; ".join(mistakes))
    for name, parameter in parameters.items():
        tensor = tensors[name]
        if tensor.device == parameter.device:
            parameter.data = tensor
        else:
            parameter.data.copy_(tensor)


def _mistakes(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    mistakes = [f"{name} is missing" for name in parameters if name not in tensors]
    mistakes += [f"{name} is unknown" for name in tensors if name not in parameters]
    for name, parameter in parameters.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        if tensor.shape != parameter.shape:
            mistakes.append(f"{name} has shape {list(tensor.shape)}, expected {list(parameter.shape)}")
        elif tensor.dtype != parameter.dtype:
            mistakes.append(f"{name} is {tensor.dtype}, expected {parameter.dtype}")
    return mistakes
