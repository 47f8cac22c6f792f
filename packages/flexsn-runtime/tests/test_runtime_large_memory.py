"""The memory of large results is reused after the results are deleted."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from runtime_cores import soft_lif
from torch import Tensor

from flexsn_runtime import PointwiseProgram, prepare, scan
from flexsn_runtime.launches import _large_memory as large_memory
from flexsn_runtime.launches._huge_pages import LARGE
from flexsn_runtime.launches._large_memory import allocator

CPU = torch.device("cpu")
COUNT = LARGE // 4
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, the system provides the memory")


@pytest.fixture(autouse=True)
def nothing_free() -> Iterator[None]:
    large_memory._free.clear()
    yield
    large_memory._free.clear()


def allocate_large(rows: int = 1) -> Tensor:
    return allocator((rows, COUNT), (COUNT, 1), dtype=torch.float32, device=CPU)()


def test_memory_is_free_after_the_last_view_is_deleted() -> None:
    tensor = allocate_large(2)
    place = tensor.data_ptr()
    assert tensor._base is None
    assert tensor.storage_offset() == 0
    view = tensor[1:].view(-1)[5:]
    array = view.numpy()
    del tensor, view
    array[:] = 3.0
    other = allocate_large(2)
    assert other.data_ptr() != place, "a view can still read it"
    other.fill_(4.0)
    assert (array == 3.0).all()
    del array
    assert allocate_large(2).data_ptr() == place


def test_other_sizes_have_other_memory() -> None:
    place = allocate_large(2).data_ptr()
    tensor = allocate_large(3)
    assert tensor.untyped_storage().nbytes() >= 3 * 4 * COUNT
    assert allocate_large(2).data_ptr() == place
    tensor.fill_(1.0)


def test_small_and_empty_tensors_use_system_memory() -> None:
    for shape, dtype in (((COUNT - 1,), torch.float32), ((COUNT,), torch.float16), ((0, COUNT), torch.float32)):
        tensor = allocator(shape, torch.empty(shape, device="meta").stride(), dtype=dtype, device=CPU)()
        assert tensor.shape == shape
        del tensor
        assert not large_memory._free


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64])
def test_strides_and_dtypes_are_as_requested(dtype: torch.dtype) -> None:
    shape, strides = (3, 4, COUNT), (4 * COUNT, 1, 4)
    tensor = allocator(shape, strides, dtype=dtype, device=CPU)()
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (shape, strides, dtype)
    tensor.zero_()[2, 3, -1] = 1
    assert tensor.untyped_storage()[-1] is not None


def test_at_most_the_limit_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_memory, "_MOST", 5 * LARGE)
    tensors = [allocate_large(2) for _ in range(4)]
    places = [tensor.data_ptr() for tensor in tensors]
    while tensors:
        del tensors[0]
    assert len(large_memory._free) == 2
    assert {allocate_large(2).data_ptr()} <= set(places[2:])


def test_threads_never_share_memory() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            tensor = allocate_large()
            tensor[0, ::4096] = number
            if not bool((tensor[0, ::4096] == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(large_memory._free) <= 2 * len(threads), "one more for each thread that is searching at this moment"


def test_results_of_a_scan_are_not_overwritten(compiler: None) -> None:
    program = PointwiseProgram(soft_lif, 1, 1, 1, on_cpu="cpp")
    x = torch.linspace(-1.0, 3.0, COUNT).view(8, -1).requires_grad_()
    (first, *_), (gradient,) = results = run_and_differentiate(program, x)
    copies = [first.clone(), gradient.clone()]
    place = first.data_ptr()
    new_results = run_and_differentiate(program, (x.detach() * 0.5).requires_grad_())
    assert new_results[0][0].data_ptr() != place
    for tensor, before in zip((first, gradient), copies, strict=True):
        assert torch.equal(tensor, before)
    del results, new_results, first
    assert torch.equal(gradient, copies[1])


def run_and_differentiate(program: PointwiseProgram, x: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    results = list(scan(*prepare(program, (x, torch.zeros_like(x[0]))), state_seqs=False))
    return results, torch.autograd.grad(results[0].sum(), [x])
