"""In the registry, a bundle of kernels exists while it is owned or used, and its kernels are closed once."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from runtime_cores import soft_lif

from flexsn_runtime import (
    PointwiseProgram,
    ScanKernel,
    UnknownHandleError,
    attach_flexsn_handle_finalizer,
    build_training_kernels,
    flexsn_kernel_registry_info,
    get_flexsn_kernel_handle,
    register_flexsn_kernel_handle,
    release_active_flexsn_kernel_handle,
    release_flexsn_kernel_handle,
    retain_flexsn_kernel_handle,
    retain_owner_flexsn_kernel_handle,
)
from flexsn_runtime.compat._handles import _handles


class Kernel:
    """A stand-in for a `ScanKernel` that counts calls."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def register(**kernels: Any) -> int:
    names = ("inference", "inference_final_state")
    empty: dict[str, Any] = {f"{name}_{kind}": None for name in names for kind in ("kernel", "info")}
    return register_flexsn_kernel_handle(
        **{**empty, "forward_kernel": None, "backward_kernel": None, "training_info": None, **kernels}
    )


def is_known(handle: int) -> bool:
    try:
        get_flexsn_kernel_handle(handle)
    except UnknownHandleError:
        return False
    return True


def test_bundle_equals_its_registration() -> None:
    forward, backward, info = build_training_kernels(soft_lif, 1, 1, 1)
    handle = register(forward_kernel=forward, backward_kernel=backward, training_info=info)
    bundle = get_flexsn_kernel_handle(handle)
    assert (bundle.forward_kernel, bundle.backward_kernel) == (forward, backward)
    assert bundle.training_info == info
    assert bundle.inference_kernel is None
    assert (bundle.owner_refs, bundle.active_refs) == (1, 0)
    assert get_flexsn_kernel_handle(torch.tensor([handle])) is bundle
    assert get_flexsn_kernel_handle(torch.tensor(handle)) is bundle
    release_flexsn_kernel_handle(torch.tensor([handle]))
    assert not is_known(handle)


def test_all_kernels_are_closed_once() -> None:
    first, second = Kernel(), Kernel()
    handle = register(inference_kernel=first, forward_kernel=second, backward_kernel=second)
    release_flexsn_kernel_handle(handle)
    release_flexsn_kernel_handle(handle)
    release_active_flexsn_kernel_handle(handle)
    assert (first.closed, second.closed) == (1, 1)


def test_owners_and_users_keep_a_bundle_alive() -> None:
    kernel = Kernel()
    handle = register(inference_kernel=kernel)
    retain_owner_flexsn_kernel_handle(handle)
    retain_flexsn_kernel_handle(handle)
    release_flexsn_kernel_handle(handle)
    release_flexsn_kernel_handle(handle)
    release_flexsn_kernel_handle(handle)  # there is no third owner, and the user still keeps the bundle
    assert is_known(handle)
    assert kernel.closed == 0
    release_active_flexsn_kernel_handle(handle)
    assert not is_known(handle)
    assert kernel.closed == 1


def test_releasing_a_missing_user_does_not_affect_the_owner() -> None:
    handle = register()
    release_active_flexsn_kernel_handle(handle)
    assert is_known(handle)
    release_flexsn_kernel_handle(handle)


@pytest.mark.parametrize(
    "use", [get_flexsn_kernel_handle, retain_flexsn_kernel_handle, retain_owner_flexsn_kernel_handle]
)
def test_unknown_handle_is_named(use: Any) -> None:
    with pytest.raises(UnknownHandleError, match=r"no kernel handle 987654321: it was never registered"):
        use(987654321)
    released = register()
    release_flexsn_kernel_handle(released)
    with pytest.raises(RuntimeError, match=str(released)):
        use(released)


def test_numbers_of_handles_are_not_reused() -> None:
    first = register()
    release_flexsn_kernel_handle(first)
    second = register()
    assert second != first
    release_flexsn_kernel_handle(second)


def test_finalizer_releases_the_handle_of_a_deleted_owner() -> None:
    class Owner:
        pass

    kernel, owner = Kernel(), Owner()
    handle = register(inference_kernel=kernel)
    finalizer = attach_flexsn_handle_finalizer(owner, handle)
    assert finalizer.alive
    del owner
    gc.collect()
    assert kernel.closed == 1
    assert not is_known(handle)


def test_many_cycles_leave_no_handles() -> None:
    kernel, before = Kernel(), len(_handles)
    for _ in range(100_000):
        release_flexsn_kernel_handle(register(inference_kernel=kernel))
    assert len(_handles) == before
    assert kernel.closed == 100_000


def test_threads_share_the_registry() -> None:
    """Adds and removes owners and users on four threads. The last removal closes the kernel once."""
    kernel = Kernel()
    shared = register(inference_kernel=kernel)
    thread_kernels = [Kernel() for _ in range(4)]
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def work(thread_kernel: Kernel) -> None:
        try:
            start.wait()
            for _ in range(500):
                retain_flexsn_kernel_handle(shared)
                retain_owner_flexsn_kernel_handle(shared)
                handle = register(inference_kernel=thread_kernel)
                assert get_flexsn_kernel_handle(handle).inference_kernel is thread_kernel  # type: ignore[comparison-overlap]
                release_flexsn_kernel_handle(handle)
                release_flexsn_kernel_handle(shared)
                release_active_flexsn_kernel_handle(shared)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(thread_kernel,)) for thread_kernel in thread_kernels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [thread_kernel.closed for thread_kernel in thread_kernels] == [500] * 4
    assert kernel.closed == 0
    bundle = get_flexsn_kernel_handle(shared)
    assert (bundle.owner_refs, bundle.active_refs) == (1, 0)
    release_flexsn_kernel_handle(shared)
    assert kernel.closed == 1


def test_finalizer_may_run_while_the_lock_is_held() -> None:
    """Runs finalizers in a garbage collection inside `register`, on the same thread."""

    class Owner:
        pass

    gc.collect()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        handles = []
        for _ in range(200):
            owner: Any = Owner()
            owner.itself = owner
            handles.append(register())
            attach_flexsn_handle_finalizer(owner, handles[-1])
            del owner
        gc.collect()
    finally:
        gc.set_threshold(*threshold)
    assert not any(is_known(handle) for handle in handles)


def test_program_is_usable_after_its_kernel_is_closed() -> None:
    x = torch.zeros(1)
    program = PointwiseProgram(soft_lif, 1, 1, 1)
    step = program.specialize_examples((x, x))
    ScanKernel(program, state_seqs=True).close()
    again = program.specialize_examples((x, x))
    assert again is not step
    assert again.trace.outputs == step.trace.outputs


def test_registry_reports_its_entries() -> None:
    before = flexsn_kernel_registry_info()
    handle = register_flexsn_kernel_handle(
        inference_kernel=None,
        inference_info=None,
        inference_final_state_kernel=None,
        inference_final_state_info=None,
        forward_kernel=None,
        backward_kernel=None,
        training_info=None,
    )
    retain_flexsn_kernel_handle(handle)
    assert flexsn_kernel_registry_info() == {**before, handle: {"owner_refs": 1, "active_refs": 1}}
    release_flexsn_kernel_handle(handle)
    assert flexsn_kernel_registry_info()[handle] == {"owner_refs": 0, "active_refs": 1}
    release_active_flexsn_kernel_handle(handle)
    assert flexsn_kernel_registry_info() == before
