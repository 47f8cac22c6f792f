"""Functions for all neurons, and other layers with state, of a network at once: state, step mode, backend."""

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
    """`(name, module)` of every `FlexSN` in `net`, and `net` itself, named like its class, if it is one.

    A neuron inside of another's step, as in a `Recurrent`, is part of that one, and is not named.
    """
    for name, module in with_state(net):
        if isinstance(module, FlexSN):
            yield name, module


def with_state(net: nn.Module) -> Iterator[tuple[str, FlexSN | Stateful]]:
    """`neurons(net)`, and the layers that keep a state, as a `Delay`."""
    for name, module in _outside_of_steps(net):
        if isinstance(module, FlexSN | Stateful):
            yield name or type(module).__name__, module


def _outside_of_steps(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules but those inside of a neuron."""
    check_module("net", net)
    inside: str | None = None  # how the names of a neuron's parts begin; they come directly after it
    for name, module in net.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        if isinstance(module, FlexSN):
            inside = f"{name}." if name else ""
        yield name, module


def run(
    net: nn.Module,
    *inputs: Any,
    lengths: Tensor | None = None,
    resets: Tensor | None = None,
    transforms: Sequence[Transform] = (),
    **options: Any,
) -> Any:
    """`net(*inputs, **options)`, where each neuron gets `lengths`, `resets` and `transforms`, as of `FlexSN.forward`.

    Layers without a state, in `OverTime` say, run over padding, too: what a linear layer with a bias makes of it ends
    at the next neuron, and a norm counts it. Read the network's output by `data.readout(output, lengths)`.

    Sequences without padding are nested tensors of layout `torch.jagged`, `[B, lengths, *step]`. The network gets them
    padded, `[T, B, *step]`, with their lengths, and outputs of that form are returned jagged again. (Waits for the
    device, for the longest length.)

    Args:
        inputs, options: of the network.
        lengths: `[B]`, whole numbers from 0 to T, for all neurons.
        resets: `[T, B]`, booleans; `[B]` in step mode `"s"`.
        transforms: other changes of each neuron's step.

    Returns:
        The network's output.

    Raises:
        StepModeError: `net` has a layer that looks at several steps and takes no lengths: `PSN`, `Delay`, or a
            `Stateful` of your own whose class does not say `steps_apart = True`.
        InputLayoutError: a `PackedSequence`, or a nested tensor of another layout.
        ParameterError: `lengths` or `resets` with a jagged input.
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
            raise ParameterError("the input is jagged, and has lengths of its own: leave out lengths and resets.")
        lengths = packed.lengths
    changes: tuple[Transform, ...] = tuple(transforms)
    if resets is not None:
        changes = (*changes, Resets(resets))
    if lengths is not None:
        changes = (*changes, Lengths(lengths))
    found = [neuron for _, neuron in neurons(net)]
    if lengths is not None or resets is not None:
        for name, module in _outside_of_steps(net):
            if not getattr(type(module), "steps_apart", True):
                raise StepModeError(
                    f"layer {name or type(module).__name__} ({type(module).__name__}) looks at several steps, and "
                    "takes no lengths and no resets: it would mix padding, or the run before, into its output. Run "
                    "sequences of one length, or leave the layer out."
                )
    earlier = [neuron._shared_transforms for neuron in found]
    try:
        for neuron in found:
            _share(neuron, (*neuron._shared_transforms, *changes))
        output = net(*inputs, **options)
        return output if packed is None else packed.jagged(output)
    finally:
        for neuron, transforms in zip(found, earlier, strict=True):
            _share(neuron, tuple(transforms))


def _share(neuron: FlexSN, transforms: tuple[Transform, ...]) -> None:
    if torch.compiler.is_compiling():
        neuron._shared_transforms = transforms
    else:  # an assignment would make the neuron look for its kernels again
        neuron.__dict__["_shared_transforms"] = transforms


def reset_net(net: nn.Module) -> None:
    """Makes every neuron, delay and dropout forget its state: call it between sequences that do not belong together.

    Example:
        >>> import torch
        >>> from flexsn_nn import IF
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), IF())
        >>> _ = net(torch.ones(4, 1, 2))
        >>> reset_net(net)
        >>> net[1].states
        []
    """
    if torch.compiler.is_compiling():  # Dynamo knows named_modules, and no other way through a network
        for _, module in with_state(net):
            module.reset()
    else:
        check_module("net", net)
        inside = recomputation()  # called once: it takes as long as the rest of a reset
        for module in _all_with_state(net):
            if type(module).reset is FlexSN.reset:
                module._forget(inside)
            else:
                module.reset()


def _all_with_state(net: nn.Module) -> list[Any]:
    """The modules of `with_state(net)`, without their names, which take most of the time to make."""
    found: list[Any] = []  # a cast is a call, too
    kinds: dict[type, bool] = {}
    seen, waiting, again = {net}, [net], False
    while waiting:
        module = waiting.pop()
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = issubclass(kind, FlexSN | Stateful)
        if kinds[kind]:
            found.append(module)
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
            elif child is not None:
                again = True
    if again:
        check_sequences(net, (FlexSN, Stateful))
    return found


def detach_net(net: nn.Module) -> None:
    """Cuts every neuron's state off from the graph that led to it, and keeps its value.

    For truncated backpropagation through time: call it between the chunks of one sequence, after `backward`.
    """
    for _, module in with_state(net):
        module.detach()


def set_step_mode(net: nn.Module, step_mode: str) -> None:
    """Sets the step mode of all with a state, and of `OverTime`: `"m"` for sequences `[T, *step]`, `"s"` for steps.

    Raises:
        UnknownNameError: another step mode.
        StepModeError: a neuron's backend cannot run in it. No neuron was changed then.
    """
    found = [module for _, module in with_state(net)]
    mode = check_step_mode(step_mode)
    for module in found:
        if isinstance(module, FlexSN):
            check_backend(module.backend, mode)
    for module in found:
        module.step_mode = mode
    for layer in net.modules():
        if isinstance(layer, OverTime):
            layer.step_mode = mode


def set_backend(
    net: nn.Module, backend: str, instance: type[nn.Module] | tuple[type[nn.Module], ...] = nn.Module
) -> None:
    """Sets the backend of every neuron; see `FlexSN`.

    Args:
        instance: of neurons of this class alone, or of these classes. Modules of other libraries are left alone.

    Raises:
        UnknownNameError: another backend.
        StepModeError: it cannot run in a neuron's step mode. No neuron was changed then.
    """
    for kind in instance if isinstance(instance, tuple) else (instance,):
        if not isinstance(kind, type):
            raise TypeError(f"instance is {kind!r}; give a class of neurons, as LIF, or a tuple of classes.")
    found = [neuron for _, neuron in neurons(net) if isinstance(neuron, instance)]
    for neuron in found:
        check_backend(backend, neuron.step_mode)
    for neuron in found:
        neuron.backend = backend


def explain(net: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] | None = None) -> NetworkReport:
    """Where the time and the memory of a training step go: a row for each layer, and one line of verdict.

    Runs some steps on these inputs, from initial states, and leaves parameters, gradients, running statistics, states
    and random streams as they were. Times are those of calls in Python: of a captured step, kernels alone count.

    Args:
        inputs: of the network.
        loss: of its output; `None`: the mean of the output's squares.

    Raises:
        ParameterError: the network returns no floating-point tensor, and there is no `loss`.

    Example:
        >>> import torch
        >>> from flexsn_nn import LIF
        >>> report = explain(torch.nn.Sequential(torch.nn.Linear(4, 8), LIF()), torch.rand(5, 2, 4))
        >>> [layer.name for layer in report.layers]
        ['0', '1', 'the rest']
    """
    from flexsn_nn.reports._explain_net import explain_net  # which needs this module

    check_module("net", net)
    return explain_net(net, inputs, loss)


def summary(net: nn.Module, *inputs: Any) -> NetworkSummary:
    """Parameters, shapes, neurons, firing rates and synaptic operations of a network, on one input.

    Runs it once, without gradients, from initial states, and leaves it as it was.

    Args:
        inputs: of the network.

    Example:
        >>> import torch
        >>> from flexsn_nn import IF
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), IF())
        >>> report = summary(net, torch.ones(5, 2, 4))
        >>> report.parameters, report.neurons, report.layers[0].output_shape
        (40, 8, (5, 2, 8))
    """
    from flexsn_nn.reports._summary import summarize  # which needs this module

    check_module("net", net)
    return summarize(net, inputs)


def get_states(net: nn.Module) -> dict[str, list[Tensor]]:
    """The states of every neuron by its name, each a list of `[*step]`; empty before the first call.

    Other layers with state are there, too: what a `Delay` keeps is `[max_delay, *step]`.

    The tensors are the neurons' own, with their graph. Use it with `set_states` to leave a sequence and come
    back to it.
    """
    return {name: list(module.states) for name, module in with_state(net)}


def set_states(net: nn.Module, states: Mapping[str, Sequence[Tensor]]) -> None:
    """Gives neurons the states that `get_states` returned; those without an entry keep theirs.

    Raises:
        UnknownNameError: a neuron that `net` does not have.
    """
    found = dict(with_state(net))
    if not isinstance(states, Mapping):
        raise TypeError(f"states is a {type(states).__name__}; give what get_states returned: a dict of lists by name.")
    for name in states:
        check_name("neuron", name, found)
    for name, values in states.items():
        found[name].states = values  # type: ignore[assignment]  # any sequence; None is a reset


def parameter_groups(net: nn.Module, *, tau_lr: float | None = None, **options: Any) -> list[dict[str, Any]]:
    """The parameters of a network in two groups for an optimizer: weights, and the numbers of its neurons.

    Numbers of neurons are time constants, thresholds, decays and other learned values of a neuron, one or one per
    channel. They have no weight decay, since it would pull a time constant to 0. Matrices inside of a step, and the
    recurrent weights of a layer, are weights.

    Args:
        tau_lr: the learning rate of the numbers of neurons; `None`: the optimizer's.
        options: of their group, as `weight_decay=1e-4` or `betas=(0.9, 0.99)`.

    Returns:
        Groups in the order of `net.parameters()`, each with `params`; a group without parameters is left out.

    Example:
        >>> import torch
        >>> from flexsn_nn import PLIF
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), PLIF())
        >>> groups = parameter_groups(net, tau_lr=1e-2)
        >>> optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
        >>> [(len(group["params"]), group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        [(2, 0.001, 0.1), (1, 0.01, 0.0)]
    """
    from flexsn_nn._parameter_groups import parameter_groups as grouped  # which needs this module

    check_module("net", net)
    return grouped(net, tau_lr, options)


def stateless(net: nn.Module) -> Stateless:
    """`net` as one module with its states in and out, for streams, `torch.export` and other forms without a memory.

    `output, states = module(inputs, states)`; `inputs` is a tensor, or a sequence of the network's inputs; `states` is
    a flat list of tensors, which `module.initial_states(inputs)` makes. The module shares the parameters and the step
    mode of `net`, and leaves its states alone. To run steps one by one, `set_step_mode(net, "s")` first.

    A layer of your own with a state takes part if it has a method `initial_states(x)`, see `Stateful`.

    Example:
        >>> import torch
        >>> from flexsn_nn import IF
        >>> module = stateless(torch.nn.Sequential(IF(), IF()))
        >>> x = torch.full((3, 1), 0.5)
        >>> y, states = module(x, module.initial_states(x))
        >>> y.flatten().tolist(), [state.tolist() for state in states]
        ([0.0, 1.0, 0.0], [[0.5], [0.0]])
    """
    from flexsn_nn._stateless import Stateless  # which needs this module

    return Stateless(net)
