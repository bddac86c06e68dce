"""Models, optimizers and random states to and from a checkpoint folder, through torch.distributed.checkpoint.

Every rank writes and reads its shards; a checkpoint of one number of ranks loads onto another.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

MODEL, OPTIMIZER, CRITIC, RANDOM = "model", "optimizer", "critic", "random"


def describe_parameters(model: nn.Module) -> dict[str, str]:
    """Name -> `float32[300, 64]`; of tied parameters the first name."""
    return {
        name: f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"
        for name, parameter in model.named_parameters()
    }


Part = tuple[nn.Module, torch.optim.Optimizer]
"""A module and the optimizer of its parameters."""


def save_state(folder: Path, policy: Part, critic: Part | None = None) -> None:
    """A collective of all ranks; files are flushed to the disk."""
    state = {**_states(policy, critic), RANDOM: _random_states()}
    state_dict_saver.save(state, storage_writer=filesystem.FileSystemWriter(folder, sync_files=True))


def load_state(folder: Path, policy: Part, critic: Part | None = None) -> None:
    """In place; a collective of all ranks."""
    states = _states(policy, critic)
    state_dict_loader.load(states, checkpoint_id=folder)
    _restore(policy, states)
    if critic is not None:
        _restore(critic, states[CRITIC])
    random_states = _random_states()
    # Partial: the checkpoint may come from fewer ranks, or from a machine without accelerators.
    state_dict_loader.load(
        {RANDOM: random_states}, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True)
    )
    for name, random_state in random_states.items():
        _set_random_state(name, random_state)


def _states(policy: Part, critic: Part | None) -> dict[str, Any]:
    states: dict[str, Any] = _state(policy)
    if critic is not None:
        states[CRITIC] = _state(critic)
    return states


def _state(part: Part) -> dict[str, Any]:
    """Without frozen weights, which are those of model.path."""
    model, optimizer = get_state_dict(*part)
    frozen = _frozen(part[0])
    return {MODEL: {name: tensor for name, tensor in model.items() if name not in frozen}, OPTIMIZER: optimizer}


def _frozen(module: nn.Module) -> set[str]:
    """Every name of theirs, for tied ones have several."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if not parameter.requires_grad}


def _restore(part: Part, states: dict[str, Any]) -> None:
    set_state_dict(
        *part,
        model_state_dict=states[MODEL],
        optim_state_dict=states[OPTIMIZER],
        options=StateDictOptions(strict=not _frozen(part[0])),
    )


def _random_states() -> dict[str, torch.Tensor]:
    """By rank, for each rank has its own."""
    states = {f"cpu-{dist.get_rank()}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"cuda-{dist.get_rank()}"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(name: str, state: torch.Tensor) -> None:
    if name.startswith("cuda"):
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
