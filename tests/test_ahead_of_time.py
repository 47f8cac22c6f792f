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

STEPS, BATCH, LARGEST_INPUT = 7, 3, 4
# Precompiled headers save time only from the second program on, but each of these tests compiles one program.
QUICKLY = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}


class ThreeStates(nn.Module):
    """A network that maps a sequence `[T, B, 1, 4, 4]` and states to outputs `[T, B, 2]` and new states.

    The weights are on a grid, so that sums are exact. A parametrization keeps the weights of the linear layer on the
    grid.
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
        on_grid(self.conv, largest_input=LARGEST_INPUT)
        for name in ("weight", "bias"):
            remove_parametrizations(self.conv, name)
        on_grid(self.linear)

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        h = self.conv(x.flatten(0, -4)).unflatten(0, x.shape[:-3])
        h, (v,) = self.first.step(h, states[:1])
        h, rest = self.second.step(h * 2.0, states[1:])
        return self.linear(h.flatten(-3)), v, *rest


def make_states() -> tuple[Tensor, ...]:
    return tuple(torch.zeros(BATCH, 3, 4, 4) for _ in range(3))


def make_inputs(num_steps: int) -> Tensor:
    return torch.randint(
        -2, LARGEST_INPUT + 1, (num_steps, BATCH, 1, 4, 4), generator=torch.Generator().manual_seed(1)
    ).float()


def compile_network(network: nn.Module, arguments: tuple[Tensor, ...], path: Path, dynamic: bool) -> Path:
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
    return compile_network(ThreeStates(), (make_inputs(STEPS), *make_states()), folder / "network.pt2", dynamic=True)


def compute_expected_results(num_steps: int) -> list[Tensor]:
    network = ThreeStates()
    network.first.backend = network.second.backend = "torch"
    with torch.no_grad():
        results = network(make_inputs(num_steps), *make_states())
    assert results[0].unique().numel() > 2, "the outputs have too few distinct values"
    return list(results)


SCRIPT = """
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
    """Returns a folder with the results of a process that ran a whole sequence and single frames without this
    project.
    """
    folder = package.parent
    torch.save([make_inputs(11), *make_states()], folder / "sequence.pt")
    frames = make_inputs(5)
    torch.export.save(torch.export.export(ThreeStates("s"), (frames[0], *make_states())), folder / "frame.pt2")
    torch.save([frames, *make_states()], folder / "frames.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=folder, env=environment, check=True)
    return folder


def test_torch_loader_runs_the_program(results: Path) -> None:
    """Runs two successive pieces of a sequence, and passes the states from one to the other. The lengths of the pieces
    differ from the length at compilation.
    """
    for actual, expected in zip(torch.load(results / "of_sequence.pt"), compute_expected_results(11), strict=True):
        assert torch.equal(actual, expected)


def test_program_runs_frame_by_frame(results: Path) -> None:
    """Checks that the exported program of a single step consists of torch's operators, and needs neither kernels nor
    this project.
    """
    for actual, expected in zip(torch.load(results / "of_frames.pt"), compute_expected_results(5), strict=True):
        assert torch.equal(actual, expected)


RECURRENT_SCRIPT = """
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
@pytest.mark.parametrize("is_compiled", [False, True], ids=["exported", "compiled"])
def test_recurrent_layers_export_with_torch_scan(
    is_compiled: bool, compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the exported program contains torch's scan, and not a Python operator for the step with products."""
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
        assert 0 < states[0].mean() < 1, "all recurrent spikes are equal"
        if not is_compiled:
            exported_output, exported_states = exported.module()(x, start)
            torch.testing.assert_close([exported_output, *exported_states], [output, *states])
            return
        path = str(tmp_path / "recurrent.pt2")
        torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=QUICKLY)
    torch.save([x, start], tmp_path / "sequence.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", RECURRENT_SCRIPT], cwd=tmp_path, env=environment, check=True)
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

// Arguments: network.pt2, a file with the bytes of the input, and a file for the bytes of the results, in order.
int main(int, char** arguments) {
    torch::inductor::AOTIModelPackageLoader network(arguments[1]);
    const int64_t steps = 9, batch = 3;
    at::Tensor x = at::empty({steps, batch, 1, 4, 4});
    std::FILE* file = std::fopen(arguments[2], "rb");
    if (std::fread(x.data_ptr(), 4, x.numel(), file) != size_t(x.numel())) return 1;
    std::fclose(file);
    std::vector<at::Tensor> values{x};
    for (int i = 0; i < 3; ++i) values.push_back(at::zeros({batch, 3, 4, 4}));
    file = std::fopen(arguments[3], "wb");
    for (const at::Tensor& result : network.run(values)) {
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
    (tmp_path / "input").write_bytes(make_inputs(9).numpy().tobytes())
    arguments = [str(package), str(tmp_path / "input"), str(tmp_path / "results")]
    ran = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    results = (tmp_path / "results").read_bytes()
    assert results == b"".join(expected.numpy().tobytes() for expected in compute_expected_results(9))
