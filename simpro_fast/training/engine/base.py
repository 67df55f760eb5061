"""What the training step needs of an engine, and what its two implementations share.

An engine owns forward, backward, the optimizer step and the world-size-free state of model and
optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from simpro_fast.config import Config
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.models import Output
from simpro_fast.training.engine.compile import compile_network
from simpro_fast.utils.errors import UserError

EngineState = dict[str, Any]
NetworkOutput = tuple[Tensor, Tensor | None]
"""Logits, and the features that the heads have seen; None where the network gives logits alone."""


def logits_and_features(output: Output) -> NetworkOutput:
    """Both, of what any network returns."""
    return output if isinstance(output, tuple) else (output, None)


class Engine(Protocol):
    """Forward, backward and optimizer step of one model over all ranks."""

    module: nn.Module
    """The student itself, not wrapped."""

    def forward(self, views: Tensor) -> NetworkOutput:
        """Views [R, C, H, W] to logits [R, K] and, where the network gives them, its features."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar loss, the mean over one micro-batch of this rank.

        After all micro-batches of a step they are the mean over these and over the ranks (at the
        latest in `step`).
        """
        ...

    def step(self, lr: float | Tensor) -> None:
        """Clip, update the weights with learning rate `lr` (a number, or []), clear the gradients.

        Called once after the last micro-batch of a step.
        """
        ...

    def save(self) -> EngineState:
        """`{"model": state dict, "optimizer": {parameter name: {slot: tensor}}}`, on every rank."""
        ...

    def load(self, state: EngineState) -> None:
        """Restore what `save` gave, whatever the number of ranks was then."""
        ...


class PrecisionForward(nn.Module):
    """The model under `train.precision`: autocast inside, so that no engine can undo it.

    bf16: weights, batch-norm state and optimizer stay float32 and only the operations that
    autocast lists run in bfloat16; logits leave in the dtype that the last layer gave them.
    fp64: the weights are float64 and the views become it here.
    """

    def __init__(self, config: Config, model: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.net = model
        self._device_type = ranks.device.type
        self._bf16 = config.train.precision == "bf16"
        self._dtype = weight_dtype(config)
        compile_network(model, config, ranks)

    def forward(self, views: Tensor) -> NetworkOutput:
        with torch.autocast(self._device_type, torch.bfloat16, enabled=self._bf16):
            # Views that are bfloat16 already are what autocast would make of them.
            output = self.net(views if self._bf16 else views.to(self._dtype))
        return logits_and_features(output)


def views_dtype(config: Config) -> torch.dtype:
    """In which a loader may hand over the views: what the first layer takes them in."""
    return torch.bfloat16 if config.train.precision == "bf16" else torch.float32


def weight_dtype(config: Config) -> torch.dtype:
    """Of weights, buffers, their average and the optimizer under `train.precision`."""
    return torch.float64 if config.train.precision == "fp64" else torch.float32


def load_model(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Strict load of a state dict; a mismatch is one line that counts and names keys."""
    wanted = set(model.state_dict())
    missing, extra = sorted(wanted - set(state)), sorted(set(state) - wanted)
    if missing or extra:
        raise UserError(
            f"the checkpoint is of another model: {len(missing)} weights missing "
            f"(first: {missing[:1]}), {len(extra)} unknown (first: {extra[:1]}); "
            "use the configuration it was trained with"
        )
    for name, tensor in model.state_dict().items():
        if state[name].shape != tensor.shape:
            raise UserError(
                f"the checkpoint is of another model (size mismatch): {name} is "
                f"{list(state[name].shape)} there and {list(tensor.shape)} here, such as with "
                "another number of heads or classes; use the configuration it was trained with"
            )
    model.load_state_dict(dict(state))


def optimizer_slots(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, dict[str, Any]]:
    """What an unsharded optimizer keeps (momentum and the like), by parameter name."""
    return {
        name: dict(optimizer.state[parameter])
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def load_optimizer_slots(
    optimizer: torch.optim.Optimizer, model: nn.Module, slots: Mapping[str, Mapping[str, Any]]
) -> None:
    """Put saved slots (momentum and the like) back, in each parameter's dtype and layout.

    Raises:
        UserError: they are of other parameters, or of other shapes.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if unknown := slots.keys() - parameters.keys():  # one without gradient so far has no slots
        raise UserError(f"the optimizer's state is that of another model (first: {min(unknown)})")
    optimizer.state.clear()
    for name, saved in slots.items():
        parameter = parameters[name]
        restored: dict[str, Any] = {}
        for slot, value in saved.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                restored[slot] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            elif isinstance(value, Tensor) and value.dim():
                found, wanted = list(value.shape), list(parameter.shape)
                raise UserError(f"the optimizer's {slot} of {name} is {found}, not {wanted}")
            elif isinstance(value, Tensor):
                # A fused optimizer counts its steps on the parameter's device.
                restored[slot] = value.to(parameter.device, copy=True)
            else:
                restored[slot] = value
        optimizer.state[parameter] = restored
