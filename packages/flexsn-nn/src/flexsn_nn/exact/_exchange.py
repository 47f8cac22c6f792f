"""Exchange of spikes and gradients between neurons and layers, without a pass over memory for their conversion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _modules

from flexsn_nn._flexsn import FlexSN
from flexsn_nn._stateful import is_own_forward
from flexsn_nn.exact._linked_step import LinkedStep
from flexsn_runtime import Links, ScanProgram, SpikeBitsError, TraceError, scan_again

_WRITTEN, _LINKS = "_flexsn_written", "_flexsn_links"
ATTRIBUTE = "_exchange"


# -- on a tensor -------------------------------------------------------------------------------------------------------


class _Written(NamedTuple):
    """Spikes in bfloat16, with the version and address of the output when the spikes were written."""

    spikes: Tensor
    version: int
    address: int


def written_of(x: Tensor) -> Tensor | None:
    """Returns the values of `x` that a neuron's kernel wrote in bfloat16, shaped like `x`; `None` without such values.

    These values exist if `x` has not changed, and is the neuron's output or a view of the whole output in the same
    order.
    """
    record: _Written | None = getattr(x, _WRITTEN, None)
    if record is None:
        base = x._base
        record = None if base is None else getattr(base, _WRITTEN, None)
    if record is None or x.is_inference() or x._version != record.version or x.data_ptr() != record.address:
        return None
    if x.numel() != record.spikes.numel() or not x.is_contiguous() or x.dtype != torch.float32:
        return None
    return record.spikes.view(x.shape)


def offer_links(y: Tensor, links: Links) -> None:
    """Attaches links to the output of a product. The neuron that reads the output removes and uses them."""
    setattr(y, _LINKS, (links, y._version))


def _take_links(x: Tensor) -> Links | None:
    """Removes and returns the links of a tensor.

    Returns `None` if the tensor has no links, has changed, or has another reader of its gradient. Only one reader of a
    tensor may receive links, because the gradients of several readers would be summed in bfloat16.
    """
    offer: tuple[Links, int] | None = getattr(x, _LINKS, None)
    if offer is None:
        return None
    delattr(x, _LINKS)
    links, version = offer
    has_other_readers = x._backward_hooks or x.retains_grad
    return None if x._version != version or has_other_readers else links


def has_hooks_before(modules: Sequence[nn.Module]) -> bool:
    """True if hooks receive inputs of these modules, and may change the inputs without a new version of a tensor."""
    return bool(_modules._global_forward_pre_hooks) or any(module._forward_pre_hooks for module in modules)


def has_hooks_after(modules: Sequence[nn.Module]) -> bool:
    """True if hooks other than those of `exact_products` receive outputs of these modules."""
    if _modules._global_forward_hooks:
        return True
    return any(_is_foreign_hook(hook) for module in modules for hook in module._forward_hooks.values())


def _is_foreign_hook(hook: object) -> bool:
    return getattr(hook, "__module__", None) != f"{__package__}._exact_products"


def can_exchange(neuron: FlexSN) -> bool:
    """True for a neuron with one input and one output, whose `forward` no user's subclass overrides.

    `precision` and `requires_grad` of the neuron must have their default values.
    """
    is_single = neuron.num_inputs == neuron.num_outputs == 1
    return is_single and neuron.requires_grad is None and neuron.precision == "eager" and is_own_forward(neuron)


# -- in a neuron -------------------------------------------------------------------------------------------------------


class SpikeExchange:
    """Runs calls of a neuron that follows or precedes exact products. The neuron stores this object as `_exchange`.

    Copies and unpickled objects create their own programs.

    Args:
        writes: True if the layers after the neuron read its spikes in bfloat16.
        takes: True if the layer before the neuron offers links, through which that layer receives gradients in parts.
        enclosing_modules: the neuron, and the modules that contain it.
    """

    def __init__(self, writes: bool, takes: bool, enclosing_modules: tuple[nn.Module, ...]) -> None:
        self.writes, self.takes, self.enclosing_modules = writes, takes, enclosing_modules
        self._programs: dict[tuple[bool, int, bool], ScanProgram] = {}
        self._rejected_core: object = None
        self._zero: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SpikeExchange, (self.writes, self.takes, self.enclosing_modules)

    def run(self, neuron: FlexSN, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """Returns the output of a call, and stores its states on the neuron; `None` if the neuron has to run as usual.

        The call must be outside of compilers, and return only an output and states.
        """
        x = inputs[0]
        attributes = neuron.__dict__
        if type(x) is not Tensor or x.dtype != torch.float32 or x.dim() < 2 or 0 in x.shape:
            return None
        core = neuron.core
        if core is self._rejected_core or torch.is_autocast_enabled(x.device.type):
            return None
        if neuron._choose(attributes["_backend"], "m", x.device, False) != "triton":
            return None
        links = _take_links(x) if self.takes else None
        if links is not None and (not torch.is_grad_enabled() or has_hooks_before(self.enclosing_modules)):
            links = None
        writes = self.writes and not has_hooks_after(self.enclosing_modules)
        if links is None and not writes:
            return None
        parts, sums = (0, False) if links is None else (len(links.parts), links.total is not None)
        program = self._get_program(neuron, core, (writes, parts, sums))
        states: list[Tensor] = attributes["states"]
        scan_inputs = inputs
        if states:
            states = neuron._prepare_states(states, inputs)
        elif sums or not neuron._can_omit_states(inputs):
            states = self._create_states(neuron, inputs)
        if links is not None:
            scan_inputs = (x.detach(), *links.parts)
            if links.total is not None:
                states = [*states, links.total]
        try:
            results = scan_again(program, scan_inputs, states)
        except (TraceError, SpikeBitsError, NotImplementedError):
            self._rejected_core = core
            return None
        except (RuntimeError, ValueError):  # the ordinary call raises a clear error
            return None
        end = neuron.num_outputs
        first_state = end + writes
        neuron._store_results(list(results[first_state : first_state + neuron.num_states]), [], None)
        attributes["_graph"] = None
        y = results[0]
        if writes and not y.is_inference() and y.is_contiguous() and results[end].is_contiguous():
            setattr(y, _WRITTEN, _Written(results[end].detach(), y._version, y.data_ptr()))
        return y

    def _create_states(self, neuron: FlexSN, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        if not neuron._can_omit_states(inputs):
            return neuron._create_initial_states(inputs)
        x = inputs[0]
        zero = self._zero
        if zero is None or zero.device != x.device or zero.is_inference() or zero.shape != x.shape[1:]:
            zero = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape[1:])
            # A zero that is created during a capture is not stored, because only replays of the graph write it.
            if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._zero = zero
        return [zero] * neuron.num_states

    def _get_program(self, neuron: FlexSN, core: Any, kind: tuple[bool, int, bool]) -> ScanProgram:
        program = self._programs.get(kind)
        if program is None or not isinstance(program.core, LinkedStep) or program.core.core is not core:
            writes, parts, sums = kind
            outputs, states = neuron.num_outputs, neuron.num_states
            program = self._programs[kind] = ScanProgram(
                LinkedStep(core, outputs, *kind),
                1 + parts,
                states + sums,
                outputs + writes,
                residuals=neuron.residuals,
                zero_one=(*(False,) * outputs, True) if writes else (),
            )
        return program
