"""Networks compiled ahead of time. torch's own loader and a C++ program run them without this project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import remove_parametrizations
from torch.utils import cpp_extension

from flexsn_nn import ALIF, LIF, RALIF, RLIF, functional, on_grid
from flexsn_nn.surrogate import ATan

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:No CUDA runtime is found:UserWarning"),
    # torch 2.11 itself raises this warning
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]

STEPS, BATCH, MOST = 7, 3, 4
# Precompiled headers save time only from the second program on, but each of these tests compiles one program.
QUICKLY = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}


class ThreeStates(nn.Module):
    """A network that maps a sequence `[T, B, 1, 4, 4]` and states to outputs `[T, B, 2]` and new states.

    The weights are on a grid, so that sums are exact. One of the two layers keeps them on the grid by a
    parametrization.
    """

    def __init__(self, step_mode: str = "m") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.first = LIF(v_reset=None, surrogate_function=ATan(), step_mode=step_mode)
        self.second = ALIF(step_mode=step_mode)
        self.linear = nn.Linear(48, 2)
        with torch.no_grad():
            for parameter in (*self.conv.parameters(), *self.linear.parameters()):
                parameter.normal_()
        on_grid(self.conv, largest_input=MOST)
        for name in ("weight", "bias"):
            remove_parametrizations(self.conv, name)
        on_grid(self.linear)

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        h = self.conv(x.flatten(0, -4)).unflatten(0, x.shape[:-3])
        h, (v,) = self.first.step(h, states[:1])
        h, rest = self.second.step(h * 2.0, states[1:])
        return self.linear(h.flatten(-3)), v, *rest


def initial() -> tuple[Tensor, ...]:
    return tuple(torch.zeros(BATCH, 3, 4, 4) for _ in range(3))


def inputs(num_steps: int) -> Tensor:
    return torch.randint(-2, MOST + 1, (num_steps, BATCH, 1, 4, 4), generator=torch.Generator().manual_seed(1)).float()


def compiled(network: nn.Module, arguments: tuple[Tensor, ...], path: Path, dynamic: bool) -> Path:
    """Compiles a program for the CPU into a file. If `dynamic` is True, the program accepts any number of steps."""
    shapes = None
    if dynamic:
        shapes = {"x": {0: torch.export.Dim("T", min=2)}, "states": (None,) * (len(arguments) - 1)}
    with torch.no_grad():
        exported = torch.export.export(network, arguments, dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=QUICKLY)
    return path


@pytest.fixture(scope="module")
def package(compiler: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ahead")
    return compiled(ThreeStates(), (inputs(STEPS), *initial()), folder / "network.pt2", dynamic=True)


def expected_results(num_steps: int) -> list[Tensor]:
    network = ThreeStates()
    network.first.backend = network.second.backend = "torch"
    with torch.no_grad():
        results = network(inputs(num_steps), *initial())
    assert results[0].unique().numel() > 2, "the outputs say nothing"
    return list(results)


ALONE = """
import torch
import sys
torch.set_num_threads(2)
run = torch._inductor.aoti_load_package("network.pt2")
x, *states = torch.load("sequence.pt")
first, *states = run(x[:3], *states)
second, *states = run(x[3:], *states)
torch.save([torch.cat([first, second]), *states], "of_sequence.pt")
run = torch.export.load("frame.pt2").module()
frames, *states = torch.load("frames.pt")
outputs = []
for frame in frames:
    output, *states = run(frame, *states)
    outputs.append(output.detach())
torch.save([torch.stack(outputs), *[s.detach() for s in states]], "of_frames.pt")
assert not [name for name in sys.modules if name.startswith("flexsn")]
"""


@pytest.fixture(scope="module")
def results(package: Path) -> Path:
    """Returns a folder with the results of a process without this project. The process ran whole sequences, and single
    frames.
    """
    folder = package.parent
    torch.save([inputs(11), *initial()], folder / "sequence.pt")
    frames = inputs(5)
    torch.export.save(torch.export.export(ThreeStates("s"), (frames[0], *initial())), folder / "frame.pt2")
    torch.save([frames, *initial()], folder / "frames.pt")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", ALONE], cwd=folder, env=alone, check=True)
    return folder


def test_torch_loader_runs_the_program(results: Path) -> None:
    """Runs two successive pieces of a sequence and hands the state on. The lengths of the pieces differ from the length
    at compilation.
    """
    for actual, expected in zip(torch.load(results / "of_sequence.pt"), expected_results(11), strict=True):
        assert torch.equal(actual, expected)


def test_program_runs_frame_by_frame(results: Path) -> None:
    """Checks that a single step consists of torch's operators. So the program needs neither kernels nor this
    project.
    """
    for actual, expected in zip(torch.load(results / "of_frames.pt"), expected_results(5), strict=True):
        assert torch.equal(actual, expected)


RECURRENT_ALONE = """
import torch
import sys
run = torch._inductor.aoti_load_package("recurrent.pt2")
x, states = torch.load("sequence.pt")
first, states = run(x[:3], states)
second, states = run(x[3:], states)
torch.save([torch.cat([first, second]), *states], "of_sequence.pt")
assert not [name for name in sys.modules if name.startswith("flexsn")]
"""


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="Inductor of torch 2.11 fails on the loop that it makes of scan",
)
@pytest.mark.long(all_but=["exported"])
@pytest.mark.parametrize("ahead", [False, True], ids=["exported", "compiled"])
def test_recurrent_layers_export_with_torch_scan(
    ahead: bool, compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the exported program contains torch's scan. Without it, a step with products is a Python operator."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), RALIF(6, beta=0.2)).eval()
    network, x = functional.stateless(net), 3 * torch.rand(8, BATCH, 4)
    start = network.initial_states(x)
    shapes = ({0: torch.export.Dim("T", min=2)}, [None] * len(start))
    with torch.no_grad():
        functional.set_backend(net, "torch")
        output, states = network(x, start)
        functional.set_backend(net, "auto")
        monkeypatch.setenv("FLEXSN_HOP_LOWERING", "scan")
        exported = torch.export.export(network, (x[:5], start), dynamic_shapes=shapes)
        monkeypatch.delenv("FLEXSN_HOP_LOWERING")
        assert "torch.ops.higher_order.scan" in str(exported)
        assert "flexsn" not in exported.graph_module.code
        assert 0 < states[0].mean() < 1, "the spikes that come back"
        if not ahead:
            actual, after = exported.module()(x, start)
            for one, other in zip([actual, *after], [output, *states], strict=True):
                torch.testing.assert_close(one, other)
            return
        path = str(tmp_path / "recurrent.pt2")
        torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=QUICKLY)
    torch.save([x, start], tmp_path / "sequence.pt")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", RECURRENT_ALONE], cwd=tmp_path, env=alone, check=True)
    for actual, expected in zip(torch.load(tmp_path / "of_sequence.pt"), [output, *states], strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.long
def test_recurrent_layers_without_torch_scan_warn(compiler: None, tmp_path: Path) -> None:
    network, x = functional.stateless(RLIF(4).eval()), torch.rand(3, 2, 4)
    with torch.no_grad():
        exported = torch.export.export(network, (x, network.initial_states(x)))
        with pytest.warns(UserWarning, match="FLEXSN_HOP_LOWERING=scan"):
            torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "r.pt2"))


PROGRAM = """
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>

// Takes network.pt2, a file with the input's bytes, and one to write the results' bytes to, one after the other.
int main(int, char** arguments) {
    torch::inductor::AOTIModelPackageLoader network(arguments[1]);
    const int64_t steps = 9, batch = 3;
    at::Tensor x = at::empty({steps, batch, 1, 4, 4});
    std::FILE* file = std::fopen(arguments[2], "rb");
    if (std::fread(x.data_ptr(), 4, x.numel(), file) != size_t(x.numel())) return 1;
    std::fclose(file);
    std::vector<at::Tensor> given{x};
    for (int i = 0; i < 3; ++i) given.push_back(at::zeros({batch, 3, 4, 4}));
    file = std::fopen(arguments[3], "wb");
    for (const at::Tensor& result : network.run(given)) {
        at::Tensor dense = result.contiguous();
        std::fwrite(dense.data_ptr(), 4, dense.numel(), file);
    }
    return std::fclose(file);
}
"""


@pytest.mark.long
def test_cpp_program_runs_the_package(package: Path, tmp_path: Path) -> None:
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(PROGRAM)
    library = Path(torch.__file__).parent / "lib"
    command = [cpp_extension.get_cxx_compiler(), "-std=c++20", "-O0", "-w", str(source), "-o", str(program)]
    command += [f"-I{folder}" for folder in cpp_extension.include_paths()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-L{library}", f"-Wl,-rpath,{library}", "-ltorch", "-ltorch_cpu", "-lc10"]
    command += ["-ltorch_cuda", "-lc10_cuda"] if torch.cuda.is_available() else []
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (tmp_path / "input").write_bytes(inputs(9).numpy().tobytes())
    arguments = [str(package), str(tmp_path / "input"), str(tmp_path / "results")]
    ran = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    results = (tmp_path / "results").read_bytes()
    assert results == b"".join(expected.numpy().tobytes() for expected in expected_results(9))
