"""FSDP2 over a one-dimensional mesh, and the process group beneath it. One rank takes the same path as many."""

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

MESH_DIMENSION = "shard"


def backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def start_alone(device: torch.device) -> bool:
    """Makes a default process group of one rank, without a port, unless there is a group already; True if it did."""
    if dist.is_initialized():
        return False
    dist.init_process_group(backend(device), store=HashStore(), rank=0, world_size=1)
    return True


def make_mesh(device: torch.device) -> DeviceMesh:
    """All ranks of the default process group."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(MESH_DIMENSION,))


def shard(root: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shards every layer by itself and the rest with the root; parameters stay float32 and compute in `dtype`."""
    if dtype == torch.float32:
        policy = MixedPrecisionPolicy()
    else:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy)


def reshard(module: nn.Module) -> None:
    """After passes that leave parameters whole: those without gradient the root's, those of `hold_whole` all."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def hold_whole(module: nn.Module, *, last: bool) -> None:
    """For the next pass with gradient: parameters stay whole from forward to backward and after, gradients are kept as
    they are, both on every rank, until the `last` of an optimizer step, which reduces the gradients over the ranks and
    cuts all up again."""
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(last)
        module.set_reshard_after_forward(False)
        module.set_reshard_after_backward(last)


def total(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Summed over the ranks, in the dtype and on the device of `tensor`; `device` is where the ranks can talk."""
    if dist.get_world_size() == 1:
        return tensor
    summed = tensor.to(device, copy=True)
    dist.all_reduce(summed)
    return summed.to(tensor.device)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a possibly sharded tensor; a collective of all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
