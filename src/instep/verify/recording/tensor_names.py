"""Names for the tensors of a training script, the same in every run."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from instep.training.forward_calls import replica_of_part


class TensorNames:
    """Names from the modules that the script calls, registered at the first call."""

    def __init__(self) -> None:
        self._of_parameter: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._roots: dict[str, nn.Module] = {}
        self.optimizers: list[Optimizer] = []
        """Those of which parameters were asked for."""

    def register(self, module: nn.Module) -> list[Tensor]:
        """Register a module that the script itself called; returns its new parameters.

        Names in the first module have no prefix; those in later ones begin with the class name.
        """
        while isinstance(module, DistributedDataParallel):
            module = module.module
        new = [(n, p) for n, p in module.named_parameters() if p not in self._of_parameter]
        if not new:
            return []
        prefix = self._prefix(module)
        self._roots[prefix] = module
        for name, parameter in new:
            self._of_parameter[parameter] = prefix + name
        return [parameter for _, parameter in new]

    def _prefix(self, module: nn.Module) -> str:
        if not self._roots:
            return ""
        kind = type(module).__name__
        count = sum(prefix.startswith(kind) for prefix in self._roots)
        return f"{kind}{count + 1 if count else ''}."

    def replicated(self) -> frozenset[str]:
        """The names of parameters whose model is replicated."""
        owned = (p for module in replica_of_part for p in module.parameters(recurse=False))
        return frozenset(self._of_parameter[p] for p in owned if p in self._of_parameter)

    def buffers(self) -> dict[str, Tensor]:
        """All current buffers of these modules."""
        return {
            prefix + name: buffer
            for prefix, module in self._roots.items()
            for name, buffer in module.named_buffers()
        }

    def parameters(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """The parameters of `optimizer`, with their names."""
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        which = next(k for k, known in enumerate(self.optimizers) if known is optimizer)
        for g, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                known = self._of_parameter.get(parameter)
                yield known or f"optimizer{which}.group{g}.{k}", parameter
