"""Functions that apply to all neurons and other layers with a state in a network: state, step mode and backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flexsn_nn._backends import check_backend, check_step_mode
from flexsn_nn._checks import check_module, check_name
from flexsn_nn._flexsn import FlexSN
from flexsn_nn._over_time import OverTime
from flexsn_nn._packed import unpack
from flexsn_nn._shared_states import check_sequences
from flexsn_nn._stateful import Stateful
from flexsn_nn._torch_private import recomputation
from flexsn_nn._within import within
from flexsn_nn.errors import ParameterError, StepModeError
from flexsn_nn.transforms import Lengths, Resets, Transform
from flexsn_nn.transforms._compose import check_transforms

if TYPE_CHECKING:
    from flexsn_nn._stateless import Stateless
    from flexsn_nn.reports import NetworkReport, NetworkSummary

__all__ = [
    "detach_net",
    "explain",
    "get_states",
    "neurons",
    "parameter_groups",
    "reset_net",
    "run",
    "set_backend",
    "set_states",
    "set_step_mode",
    "stateless",
    "summary",
    "within",
]


def neurons(net: nn.Module) -> Iterator[tuple[str, FlexSN]]:
    """Yields `(name, module)` for every `FlexSN` in `net`. If `net` itself is a `FlexSN`, its name is its class name.

    A neuron inside of another neuron's step, as in a `Recurrent`, is a part of that neuron, and is not included.
    """
    for name, module in with_state(net):
        if isinstance(module, FlexSN):
            yield name, module


def with_state(net: nn.Module) -> Iterator[tuple[str, FlexSN | Stateful]]:
    """Yields the items of `neurons(net)`, and other layers with a state, such as a `Delay`."""
    for name, module in _outside_of_steps(net):
        if isinstance(module, FlexSN | Stateful):
            yield name or type(module).__name__, module


def _outside_of_steps(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields all modules with their names, except the submodules of neurons."""
    check_module("net", net)
    # Prefix of the names of a neuron's submodules. `named_modules` yields these submodules directly after the neuron.
    neuron_prefix: str | None = None
    for name, module in net.named_modules():
        if neuron_prefix is not None and name.startswith(neuron_prefix):
            continue
        if isinstance(module, FlexSN):
            neuron_prefix = f"{name}." if name else ""
        yield name, module


def run(
    net: nn.Module,
    *inputs: Any,
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    transforms: Sequence[Transform] = (),
    **options: Any,
) -> Any:
    """Calls `net(*inputs, **options)`, and passes `lengths`, `resets` and `transforms` to each neuron.

    The three arguments have the same meaning as in `FlexSN.forward`. Layers without a state, for example those in
    `OverTime`, also run over padding. At padding steps, a linear layer with a bias computes values that the next neuron
    removes, but a norm includes padding in its statistics. Read the network's output with
    `data.readout(output, lengths)`.

    Inputs may also be sequences without padding: nested tensors of layout `torch.jagged`, `[B, lengths, *step]`. The
    network then receives padded tensors `[T, B, *step]` and the lengths, and its outputs are converted back to jagged
    tensors. Such a call waits for the device, to read the largest length.

    Args:
        inputs, options: arguments of the network.
        lengths: `[B]`, whole numbers from 0 to T, for all neurons.
        resets: `[T, B]`, booleans, for all neurons; `[B]` in step mode `"s"`.
        transforms: other changes of each neuron's step.

    Returns:
        The network's output.

    Raises:
        StepModeError: `net` has a layer that reads several steps but does not support lengths: `PSN`, `Delay`, or your
            own `Stateful` layer whose class does not set `steps_apart = True`.
        InputLayoutError: an input is a `PackedSequence`, or a nested tensor of another layout.
        ParameterError: `lengths` or `resets` are passed with a jagged input.
        The errors of the neurons.

    Example:
        >>> import torch
        >>> from flexsn_nn import IF
        >>> net = torch.nn.Sequential(IF(), IF())
        >>> run(net, torch.ones(3, 2, 1), lengths=torch.tensor([3, 1]))[:, :, 0].T.tolist()
        [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    """
    check_transforms(transforms)
    inputs, packed = unpack(inputs)
    if packed is not None:
        if lengths is not None or resets is not None:
            raise ParameterError("the input is jagged, and therefore has its own lengths: omit lengths and resets.")
        lengths = packed.lengths
    changes: tuple[Transform, ...] = tuple(transforms)
    if resets is not None:
        changes = (*changes, Resets(resets))
    if lengths is not None:
        changes = (*changes, Lengths(lengths))
    all_neurons = [neuron for _, neuron in neurons(net)]
    if lengths is not None or resets is not None:
        for name, module in _outside_of_steps(net):
            if not getattr(type(module), "steps_apart", True):
                raise StepModeError(
                    f"layer {name or type(module).__name__} ({type(module).__name__}) reads several steps, and "
                    "supports neither lengths nor resets: its output would depend on padding, or on the steps before a "
                    "reset. Run sequences of equal length, or remove the layer."
                )
    earlier = [neuron._shared_transforms for neuron in all_neurons]
    try:
        for neuron in all_neurons:
            _share(neuron, (*neuron._shared_transforms, *changes))
        output = net(*inputs, **options)
        return output if packed is None else packed.jagged(output)
    finally:
        for neuron, transforms in zip(all_neurons, earlier, strict=True):
            _share(neuron, tuple(transforms))


def _share(neuron: FlexSN, transforms: tuple[Transform, ...]) -> None:
    if torch.compiler.is_compiling():
        neuron._shared_transforms = transforms
    else:  # assigning the attribute would make the neuron choose kernels again
        neuron.__dict__["_shared_transforms"] = transforms


def reset_net(net: nn.Module) -> None:
    """Resets every neuron, delay and dropout layer of a network. Call this function before each independent sequence.

    Example:
        >>> import torch
        >>> from flexsn_nn import IF
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), IF())
        >>> _ = net(torch.ones(4, 1, 2))
        >>> reset_net(net)
        >>> net[1].states
        []
    """
    if torch.compiler.is_compiling():  # Dynamo can trace `named_modules`, but not `_list_all_with_state`
        for _, module in with_state(net):
            module.reset()
    else:
        check_module("net", net)
        # `recomputation` is called once for all modules, because a call takes as long as the rest of a reset.
        current_recomputation = recomputation()
        for module in _list_all_with_state(net):
            if type(module).reset is FlexSN.reset:
                module._forget(current_recomputation)
            else:
                module.reset()


def _list_all_with_state(net: nn.Module) -> list[Any]:
    """Returns the modules of `with_state(net)`, and the neurons inside of neurons. Leaves out names to save time."""
    modules: list[Any] = []  # `Any`, because `cast` would be another call for each module
    has_state_by_type: dict[type, bool] = {}
    visited, pending, has_shared = {net}, [net], False
    while pending:
        module = pending.pop()
        kind = type(module)
        if kind not in has_state_by_type:
            has_state_by_type[kind] = issubclass(kind, FlexSN | Stateful)
        if has_state_by_type[kind]:
            modules.append(module)
        for child in module._modules.values():
            if child is not None and child not in visited:
                visited.add(child)
                pending.append(child)
            elif child is not None:
                has_shared = True
    if has_shared:
        check_sequences(net, (FlexSN, Stateful))
    return modules


def detach_net(net: nn.Module) -> None:
    """Detaches the states of all neurons, and of other layers with a state, from their graphs. Values do not change.

    For truncated backpropagation through time, call this function between two parts of a sequence, after `backward`.
    """
    for _, module in with_state(net):
        module.detach()


def set_step_mode(net: nn.Module, step_mode: str) -> None:
    """Sets the step mode of all layers with a state, and of `OverTime`: `"m"` for sequences, `"s"` for single steps.

    Raises:
        UnknownNameError: the step mode is unknown.
        StepModeError: a neuron's backend cannot run in this mode. The error leaves all neurons unchanged.
    """
    layers_with_state = [module for _, module in with_state(net)]
    mode = check_step_mode(step_mode)
    for module in layers_with_state:
        if isinstance(module, FlexSN):
            check_backend(module.backend, mode)
    for module in layers_with_state:
        module.step_mode = mode
    for layer in net.modules():
        if isinstance(layer, OverTime):
            layer.step_mode = mode


def set_backend(
    net: nn.Module, backend: str, instance: type[nn.Module] | tuple[type[nn.Module], ...] = nn.Module
) -> None:
    """Sets the backend of every neuron; see `FlexSN`.

    Args:
        instance: class or classes of the neurons to change. Modules of other libraries are never changed.

    Raises:
        UnknownNameError: the backend is unknown.
        StepModeError: the backend cannot run in a neuron's step mode. The error leaves all neurons unchanged.
    """
    for kind in instance if isinstance(instance, tuple) else (instance,):
        if not isinstance(kind, type):
            raise TypeError(f"instance is {kind!r}; give a class of neurons, such as LIF, or a tuple of classes.")
    selected_neurons = [neuron for _, neuron in neurons(net) if isinstance(neuron, instance)]
    for neuron in selected_neurons:
        check_backend(backend, neuron.step_mode)
    for neuron in selected_neurons:
        neuron.backend = backend


def explain(net: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] | None = None) -> NetworkReport:
    """Measures time and memory of a training step, with one row for each layer and a summary in one line.

    Runs a few steps on these inputs, from initial states, and then restores gradients, running statistics, states and
    random generators. The times include the time that Python takes. A training step that is captured as a CUDA graph
    takes only the time of its kernels.

    Args:
        inputs: inputs of the network.
        loss: function of the network's output; `None` for the mean of the output's squares.

    Raises:
        ParameterError: `loss` is missing, and the network does not return a floating-point tensor.

    Example:
        >>> import torch
        >>> from flexsn_nn import LIF
        >>> report = explain(torch.nn.Sequential(torch.nn.Linear(4, 8), LIF()), torch.rand(5, 2, 4))
        >>> [layer.name for layer in report.layers]
        ['0', '1', 'the rest']
    """
    from flexsn_nn.reports._explain_net import explain_net  # that module imports this one

    check_module("net", net)
    return explain_net(net, inputs, loss)


def summary(net: nn.Module, *inputs: Any) -> NetworkSummary:
    """Reports the parameters, shapes, neurons, firing rates and synaptic operations of a network for one input.

    Runs the network once, without gradients, from initial states, and restores it afterwards.

    Args:
        inputs: inputs of the network.

    Example:
        >>> import torch
        >>> from flexsn_nn import IF
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), IF())
        >>> report = summary(net, torch.ones(5, 2, 4))
        >>> report.parameters, report.neurons, report.layers[0].output_shape
        (40, 8, (5, 2, 8))
    """
    from flexsn_nn.reports._summary import summarize  # that module imports this one

    check_module("net", net)
    return summarize(net, inputs)


def get_states(net: nn.Module) -> dict[str, list[Tensor]]:
    """Returns the states of every neuron by its name, as lists of tensors `[*step]`; empty before the first call.

    Other layers with a state are included. The state of a `Delay` is `[max_delay, *step]`.

    The tensors are not copied, and keep their graph. You can run another sequence, and then return to the first
    sequence with `set_states`.
    """
    return {name: list(module.states) for name, module in with_state(net)}


def set_states(net: nn.Module, states: Mapping[str, Sequence[Tensor]]) -> None:
    """Sets the states of neurons, and of other layers with a state, to states from `get_states`.

    Layers without an entry keep their states.

    Raises:
        UnknownNameError: `net` has no layer with a state that has the name of an entry.
    """
    layers = dict(with_state(net))
    if not isinstance(states, Mapping):
        raise TypeError(f"states is a {type(states).__name__}; give the result of get_states: a dict of lists by name.")
    for name in states:
        check_name("neuron", name, layers)
    for name, values in states.items():
        layers[name].states = values  # type: ignore[assignment]  # any sequence; None is a reset


def parameter_groups(net: nn.Module, *, tau_lr: float | None = None, **options: Any) -> list[dict[str, Any]]:
    """Divides the parameters of a network into two groups for an optimizer: weights, and neuron parameters.

    Neuron parameters are time constants, thresholds, decays and other learned values, one per neuron or per channel.
    By default, they get no weight decay, which would pull a time constant to 0. Matrices inside of a step, and the
    recurrent weights of a layer, count as weights.

    Args:
        tau_lr: learning rate of the neuron parameters; `None` for the learning rate of the optimizer.
        options: options of the group of neuron parameters, such as `betas=(0.9, 0.99)`, or `weight_decay=1e-4`.

    Returns:
        The group of weights, then the group of neuron parameters, each with `params` in the order of
        `net.parameters()`. A group without parameters is left out.

    Example:
        >>> import torch
        >>> from flexsn_nn import PLIF
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), PLIF())
        >>> groups = parameter_groups(net, tau_lr=1e-2)
        >>> optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
        >>> [(len(group["params"]), group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        [(2, 0.001, 0.1), (1, 0.01, 0.0)]
    """
    from flexsn_nn._parameter_groups import parameter_groups as grouped  # that module imports this one

    check_module("net", net)
    return grouped(net, tau_lr, options)


def stateless(net: nn.Module) -> Stateless:
    """Returns `net` as a module that takes and returns its states, for streams, `torch.export` and other programs.

    The call is `output, states = module(inputs, states)`. `inputs` is a tensor, or a sequence of the network's inputs.
    `states` is a flat list of tensors from `module.initial_states(inputs)`. The module shares the parameters and the
    step mode of `net`, and does not change the states of `net`. To run single steps, call `set_step_mode(net, "s")`
    first.

    Your own layers with a state are supported if they have a method `initial_states(x)`; see `Stateful`.

    Example:
        >>> import torch
        >>> from flexsn_nn import IF
        >>> module = stateless(torch.nn.Sequential(IF(), IF()))
        >>> x = torch.full((3, 1), 0.5)
        >>> y, states = module(x, module.initial_states(x))
        >>> y.flatten().tolist(), [state.tolist() for state in states]
        ([0.0, 1.0, 0.0], [[0.5], [0.0]])
    """
    from flexsn_nn._stateless import Stateless  # that module imports this one

    return Stateless(net)
