"""AdamW with its moments in host memory, which saves 8 bytes per parameter on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from rlscale.training.optim.muon import local_shard


class HostAdamW(torch.optim.AdamW):
    """Steps on the CPU with torch's fused kernel. Parameters and gradients stay on their device between steps.

    Each step copies parameter and gradient to the host and the parameter back: 12 bytes per parameter. On a CPU it is
    bitwise equal to AdamW.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # returns no loss
        """Steps every parameter with a gradient."""
        assert closure is None, "the gradient is computed before"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(host_state(parameter))
                on_device = local_shard(parameter)
                weight = on_device.cpu()
                adamw(
                    [weight],
                    [local_shard(parameter.grad).cpu()],
                    [local_shard(state["exp_avg"])],
                    [local_shard(state["exp_avg_sq"])],
                    [],
                    [state["step"]],
                    fused=True,
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                # `cpu()` returns the tensor itself on a CPU: then the kernel has updated it in place.
                if weight is not on_device:
                    on_device.copy_(weight)


def host_state(parameter: Tensor, *, num_steps: int = 0) -> dict[str, Tensor]:
    """State of Adam in host memory, sharded as the parameter, after `num_steps` steps without a gradient."""
    moments = {name: _host_zeros(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(float(num_steps)), **moments}


def _host_zeros(parameter: Tensor) -> Tensor:
    zeros = torch.zeros_like(local_shard(parameter), device="cpu", memory_format=torch.contiguous_format)
    if not isinstance(parameter, DTensor):
        return zeros
    # The constructor, as FSDP uses it to offload: `from_local` would move the tensor to the device of the mesh.
    return DTensor(zeros, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
