"""`foreach` computes lists of tensors with one launch in Triton, and with several launches in C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flexsn_codegen import ArgumentError, AutogradError, pointwise
from flexsn_codegen.functions import _together

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def lion(p: Tensor, g: Tensor, m: Tensor, lr: float, betas: tuple[float, float]) -> None:
    p.sub_(torch.sign(m * betas[0] + g * (1 - betas[0])), alpha=lr)
    m.mul_(betas[1]).add_(g, alpha=1 - betas[1])


def draw_tensors(sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(size, device=DEVICE).to(dtype) for size in sizes]


@pytest.fixture(params=["triton", "cpp"])
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    from flexsn_codegen.targets.triton import device

    if request.param == "cpp":
        if DEVICE == "cuda":
            pytest.skip("C++ is for the CPU")
        request.getfixturevalue("compiler")
        monkeypatch.setattr(device, "INTERPRETED", False)
    return str(request.param)


def test_one_launch_updates_all_parameters(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    launch = _together.Group.launch

    def count_launch(group: _together.Group, words: Any) -> None:
        launched.append(group.table.shape[0])
        launch(group, words)

    monkeypatch.setattr(_together.Group, "launch", count_launch)
    # Some tensors need several programs, and a partial program. Others are empty or have no dimensions.
    sizes = [(3, 1001), (7,), (), (0, 4), (2, 3, 5), (64, 20)]
    step = pointwise(lion)
    new_gradients = draw_tensors(sizes, torch.float32, 7) + draw_tensors([(9, 5)], torch.bfloat16, 7)
    runs: list[list[Tensor]] = []
    for together in (True, False):
        p = draw_tensors(sizes, torch.float32, 0) + draw_tensors([(9, 5)], torch.bfloat16, 1)
        m = [torch.zeros_like(tensor) for tensor in p]
        for i in range(2):
            g = draw_tensors(sizes, torch.float32, 2 + i) + draw_tensors([(9, 5)], torch.bfloat16, 5)
            if together:
                assert step.foreach(p, g, m, 0.1 * (i + 1), (0.9, 0.99)) == [None] * 7
            else:
                for arguments in zip(p, g, m, strict=True):
                    lion(*arguments, 0.1 * (i + 1), (0.9, 0.99))
        for i in range(2):  # the tensors have the same addresses each time, like parameters
            lr = 0.01 * (i + 1)
            versions = [tensor._version for tensor in p]
            if together:
                step.foreach(p, new_gradients, m, lr, (0.9, 0.99))
                assert all(tensor._version > before for tensor, before in zip(p, versions, strict=True))
            else:
                for arguments in zip(p, new_gradients, m, strict=True):
                    lion(*arguments, lr, (0.9, 0.99))
        runs.append(p + m)
    for a, e in zip(*runs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6 if a.dtype == torch.float32 else 0.02, atol=1e-6)
    if language == "triton":
        # Each step has one launch per dtype, with one program per 1024 elements of a tensor. There is one more launch
        # for the tensors that can be moved in vectors.
        assert launched == [3 + 1 + 1 + 1, 2, 1] * 4


def test_results_equal_eager_mode_for_shared_and_strided_tensors(language: str) -> None:
    function: Any = pointwise(lambda x, scale, flag: (x * scale, x > scale if flag else x))
    xs = [*draw_tensors([(5, 6), (1030,)], torch.float32, 0), torch.randn(4, 7, device=DEVICE).t()]
    scale = torch.tensor(0.5, device=DEVICE)
    for (product, mask), x in zip(function.foreach(xs, scale, True), xs, strict=True):
        assert torch.equal(product, x * scale)
        assert torch.equal(mask, x > scale)


def test_wrong_lists_are_refused() -> None:
    step = pointwise(lion)
    p = draw_tensors([(3,), (4,)], torch.float32, 0)
    with pytest.raises(ArgumentError, match=r"of equal length, but the lengths of the lists are \[1, 2\]"):
        step.foreach(p, p[:1], p, 0.1, (0.9, 0.99))
    with pytest.raises(ArgumentError, match="no argument is such a list"):
        step.foreach(p[0], p[0], p[0], 0.1, (0.9, 0.99))
    with pytest.raises(AutogradError, match="no_grad"):
        pointwise(torch.neg).foreach([p[0].requires_grad_()])


def halved(p: Tensor, g: Tensor, rate: float) -> None:
    p.mul_(0.5).sub_(g, alpha=rate)


def test_step_that_is_prepared_again_uses_the_changed_values() -> None:
    step = pointwise(halved)
    sizes = [(40, 13), (16,), (32, 2)]

    def check(p: list[Tensor], g: list[Tensor], rate: float) -> None:
        expected = [parameter * 0.5 - gradient * rate for parameter, gradient in zip(p, g, strict=True)]
        step.foreach(p, g, rate)
        for a, e in zip(p, expected, strict=True):
            torch.testing.assert_close(a, e)

    p, g = draw_tensors(sizes, torch.float32, 0), draw_tensors(sizes, torch.float32, 1)
    check(p, g, 0.1)
    check(p, g, 0.2)
    old_gradients = g
    g = draw_tensors(sizes, torch.float32, 2)  # their memory differs from that of the old gradients, which still exist
    check(p, g, 0.2)
    check(p, old_gradients, 0.3)
    # The address of this gradient allows no vector loads.
    shifted = torch.randn(33, device=DEVICE)[1:17]
    check(p, [g[0], shifted, g[2]], 0.3)
    p[2].data = torch.randn(32, 2, device=DEVICE)
    check(p, g, 0.3)
    p[0].t_(), g[0].t_()  # the addresses are unchanged, but the strides differ
    check(p, g, 0.3)
    p[0] = p[0].double()
    g[0] = g[0].double()
    check(p, g, 0.3)
    p[1].requires_grad_()
    with pytest.raises(AutogradError, match="no_grad"):
        step.foreach(p, g, 0.3)
    with torch.no_grad():
        check(p, g, 0.3)


def test_repeated_calls_use_current_captured_tensors(language: str) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(2.0, device=DEVICE), requires_grad=False)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x.add_(y), x * self.scale

    module = Scaled()
    function: Any = pointwise(module)
    x, y = draw_tensors([(5, 6), (1030,)], torch.float32, 0), draw_tensors([(5, 6), (1030,)], torch.float32, 1)
    for scale in (2.0, 3.0, 4.0):
        module.scale.data = torch.tensor(scale, device=DEVICE)
        expected = [a + b for a, b in zip(x, y, strict=True)]
        for i, (same, product) in enumerate(function.foreach(x, y)):
            assert same is x[i]
            torch.testing.assert_close(x[i], expected[i])
            torch.testing.assert_close(product, expected[i] * scale)


def test_entries_that_share_memory_run_one_after_the_other(language: str) -> None:
    step = pointwise(halved)
    shared, other = draw_tensors([(50,), (50,)], torch.float32, 0)
    expected, gradient = shared * 0.25 - 0.75 * other, other.clone()
    for _ in range(2):  # the parameter is in the list twice
        p = shared.clone()
        step.foreach([p, p], [gradient, gradient], 0.5)
        torch.testing.assert_close(p, expected)
    # Two halves of one memory may be computed together. A gradient that another entry writes must be read before or
    # after the write, in the order of the entries.
    memory = torch.ones(64, device=DEVICE)
    step.foreach([memory[:32], memory[32:]], [memory.new_ones(32), memory.new_zeros(32)], 0.5)
    assert memory.unique().tolist() == [0.0, 0.5]
    a, b = torch.ones(20, device=DEVICE), torch.ones(20, device=DEVICE)
    step.foreach([a, b], [b, a], 0.5)
    assert [tensor.unique().tolist() for tensor in (a, b)] == [[0.0], [0.5]]


def test_numbers_that_depend_on_dimensions_are_separate() -> None:
    def scaled(x: Tensor, a: float, b: float) -> None:
        x.mul_(a if x.dim() == 1 else b)

    xs = [torch.ones(32, device=DEVICE), torch.ones(2, 16, device=DEVICE)]
    pointwise(scaled).foreach(xs, 3.0, 5.0)
    assert [x.unique().tolist() for x in xs] == [[3.0], [5.0]]


def test_lazily_negated_tensors_are_negated() -> None:
    x = torch.complex(torch.ones(8), torch.ones(8)).conj().imag.to(DEVICE)
    doubled: Any = pointwise(lambda x: x * 2)
    for result in (*doubled.foreach([x, torch.ones(8, device=DEVICE)]), *doubled.foreach([x, x])):
        assert abs(result).unique().tolist() == [2.0]
    assert doubled.foreach([torch.complex(torch.ones(8), torch.ones(8)).conj().imag])[0].unique().tolist() == [-2.0]


def moved(p: Tensor, g: Tensor, m: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    m.mul_(0.9).add_(g, alpha=0.1)
    return p - m * lr, m


def positive(p: Tensor, g: Tensor, m: Tensor, lr: float) -> dict[str, Tensor]:
    return {"mixed": p * lr + g, "above": m > 0}


def descent(p: Tensor, g: Tensor, m: Tensor, lr: float) -> None:
    m.mul_(0.9).add_(g, alpha=0.1)
    p.sub_(m, alpha=lr)


@pytest.mark.long(all_but=["descent"])
@pytest.mark.parametrize("function", [descent, moved, positive], ids=lambda function: function.__name__)
def test_compiled_code_contains_one_operator(function: Any) -> None:
    graphs: list[list[str]] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        def look(module: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append([str((node.target, node.args[:1])) for node in module.graph.nodes])
            return module

        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=look)(module, inputs)

    torch.compiler.reset()
    kernel = pointwise(function)
    compiled = torch.compile(lambda *lists: kernel.foreach(*lists), backend=backend, fullgraph=True)
    sizes = [(3, 4), (5,), (), (3, 4)]
    for lr in (0.1, 0.2, 0.3):
        runs = []
        for call in (compiled, lambda *lists: [function(*each, lists[-1]) for each in zip(*lists[:3], strict=True)]):
            lists = [draw_tensors(sizes, torch.float32, seed) for seed in range(3)]
            with torch.no_grad():
                returned = call(*lists, lr)
            runs.append([t for t in torch.utils._pytree.tree_leaves((lists, returned)) if t is not None])
        for a, e in zip(*runs, strict=True):
            torch.testing.assert_close(a, e)
    assert len(graphs) <= 2  # the second graph treats the number as a symbol
    assert all(sum("pointwise" in node for node in graph) == 1 for graph in graphs)
