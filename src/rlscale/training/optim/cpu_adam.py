"""AdamW whose moments lie in host memory: 8 bytes a parameter less on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from rlscale.training.optim.muon import local_shard


class HostAdamW(torch.optim.AdamW):
    """Steps on the CPU, by torch's fused kernel: a parameter and its gradient come down, the parameter goes up again.

    12 bytes a parameter cross the bus in each step. Parameters and gradients stay on their device between steps. On a
    CPU it is AdamW, bit for bit.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # gives no loss
        """One step of every parameter with a gradient."""
        assert closure is None, "the gradient is there already"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(host_state(parameter))
                theirs = local_shard(parameter)
                weight = theirs.cpu()
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
                if weight is not theirs:
                    theirs.copy_(weight)


def host_state(parameter: Tensor, *, num_steps: int = 0) -> dict[str, Tensor]:
    """Adam's state of a parameter in host memory, sharded as the parameter is, after `num_steps` without a gradient."""
    moments = {name: _host_zeros(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(float(num_steps)), **moments}


def _host_zeros(parameter: Tensor) -> Tensor:
    zeros = torch.zeros_like(local_shard(parameter), device="cpu", memory_format=torch.contiguous_format)
    if not isinstance(parameter, DTensor):
        return zeros
    # By the class itself, as FSDP does for what it offloads: `from_local` would move it to the mesh's device.
    return DTensor(zeros, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
