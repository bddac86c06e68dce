"""The critic of PPO: what a state is worth, as a head on the policy's backbone or a model of its own.

Letters: B rows, T padded length, D width of the backbone.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flashflow.algorithms.advantages import Total
from flashflow.config.sections import CriticSection
from flashflow.errors import ConfigError
from flashflow.models import load_model
from flashflow.trainers import sharding
from flashflow.trainers.backbone import hidden_states, prepare, recompute, width_of
from flashflow.trainers.update import Updater


class ValueHead(nn.Module):
    """A linear map of the state in which a token was sampled, that is of the hidden state one place before it.

    Starts at 0, which needs no random numbers and says nothing of any state.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """Values float32 [B, T], 0 outside the mask, which is false in column 0. Computes in float32 always."""
        values_BT = self.linear(hidden_BTD.float()).squeeze(-1).roll(1, dims=1)
        return torch.where(mask_BT, values_BT, 0.0)


class ValueModel(nn.Module):
    """A backbone of its own with a ValueHead."""

    def __init__(self, model: Any) -> None:
        """model: a transformers causal LM in float32, taken over; its language head is dropped."""
        super().__init__()
        prepare(model)
        self.backbone = model.base_model
        self.head = ValueHead(width_of(model), next(model.parameters()).device)

    def forward(self, tokens_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """Values float32 [B, T], 0 outside the mask."""
        values_BT: torch.Tensor = self.head(hidden_states(self.backbone, tokens_BT), mask_BT)
        return values_BT


class Critic:
    """Head or model, sharded as the policy is, and its own AdamW."""

    def __init__(
        self,
        section: CriticSection,
        policy: Any,
        num_steps: int,
        mesh: DeviceMesh,
        dtype: torch.dtype,
        *,
        activation_checkpointing: bool = False,
    ) -> None:
        """policy: the unsharded causal LM, as loaded. Raises ConfigError on a model that does not fit it."""
        self.module: ValueHead | ValueModel
        if section.kind == "value_head":
            self.module = ValueHead(width_of(policy), next(policy.parameters()).device)
            sharding.shard(self.module, nn.ModuleList(), mesh, torch.float32)
        else:
            self.module = ValueModel(_own_model(section, policy).float())
            # By itself, for it computes in float32 whatever the backbone does.
            sharding.shard(self.module.head, nn.ModuleList(), mesh, torch.float32)
            if activation_checkpointing:
                recompute(self.module.backbone.layers)
            sharding.shard(self.module, self.module.backbone.layers, mesh, dtype)
        self.loss_coefficient = section.loss_coefficient if section.kind == "value_head" else 1.0
        self.updater = Updater(self.module, section, num_steps, name="critic")


def explained_variance(values_NT: torch.Tensor, returns_NT: torch.Tensor, mask_NT: torch.Tensor, total: Total) -> float:
    """1 - Var(return - value) / Var(return) over the tokens to be trained, of all ranks: 1 is a perfect critic, 0 no
    better than a constant; 0 where the returns do not vary."""
    # Two columns: returns and errors. Their variances need no division by n - 1, which cancels.
    both_M2 = torch.stack([returns_NT, returns_NT - values_NT], dim=-1)[mask_NT].double()
    n = total(torch.tensor(float(len(both_M2))))
    means_2 = total(both_M2.sum(0)) / n.clamp(min=1)
    squares, of_errors = total((both_M2 - means_2).square().sum(0)).tolist()
    return 1 - of_errors / squares if squares else 0.0


def _own_model(section: CriticSection, policy: Any) -> Any:
    if section.path is None:
        return copy.deepcopy(policy)
    model = load_model(section.path, "float32").to(next(policy.parameters()).device)
    known, needed = (each.get_input_embeddings().weight.shape[0] for each in (model, policy))
    if known < needed:
        raise ConfigError(
            [f"critic.path: {section.path} knows {known} tokens, the policy {needed}; use a model of its family"]
        )
    return model
