"""Exported programs that need no other package: torch.export, AOTInductor, and the refusals of all program formats."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
import lowbit_kernels as kernels
from lowbit import Int4WeightOnly, formats
from lowbit.formats import FormatError
from lowbit.formats.programs.aoti import foreign_ops
from lowbit.formats.programs.base import Call
from lowbit.formats.programs.capture import traced
from lowbit.formats.programs.running import (
    TOLERANCE,
    TOLERANCE_FLOAT32,
    compare,
    outputs_of,
    tolerance_of,
)
from lowbit_kernels.runtime import host_compiler
from tests import forked
from tests.formats.programs import FEATURES, LINEARS, batch_of, every_preset, inputs, relative
from tests.optim.conftest import needs_compiler

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
X = torch.linspace(-1, 1, 3 * FEATURES).view(3, FEATURES)


def network(scheme: Any = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    if scheme is not None:
        lowbit.quantize_(model, scheme)
    return model


@pytest.fixture(scope="module", autouse=True)
def _quick_wrappers() -> Iterator[None]:
    """A package's C++ that calls the compiled kernels: optimized, its compilation takes twice as long. Headers that are
    compiled ahead pay for a third package, and there are two. Loops of vectors stay: Inductor compiles them wrong where
    `lowbit.numerics.blocks.crop` does not prevent it."""
    options = {"compile_wrapper_opt_level": "O0", "precompile_headers": False}
    with torch._inductor.config.patch({f"aot_inductor.{n}": value for n, value in options.items()}):
        yield


FORMS = (
    "int4",
    "int4_asymmetric",
    "int8",
    "int8_groups",
    "int3",
    "float8",
    "int8xint4",
    "nf4_double",
    "int8xint8_static",
    "float8xfloat8",
    "float8xfloat8_blocks",
    "mxfp4",
    "nvfp4",
)
"""Presets that differ by more than by their number of bits."""


@functools.cache
def exported(
    dtype: torch.dtype, presets: tuple[str, ...]
) -> tuple[nn.Module, torch.export.ExportedProgram]:
    """A model of these presets, and its program with a dynamic batch."""
    model = every_preset(dtype, presets)
    with torch.no_grad():
        return model, torch.export.export(model, inputs(dtype), dynamic_shapes=batch_of())


def printed(done: subprocess.CompletedProcess[str]) -> Any:
    """What a program printed as JSON."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def without_lowbit(code: str, *arguments: object) -> Any:
    """What `code` prints as JSON in a new process that cannot import lowbit."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 240}
    return printed(subprocess.run(command, **options))


# ---- torch.export --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "presets"),
    [
        (torch.float16, FORMS),  # the packages below are of the other dtypes
        *(pytest.param(d, tuple(LINEARS), marks=pytest.mark.exhaustive) for d in DTYPES),
    ],
    ids=["forms-float16", "every-float32", "every-bfloat16", "every-float16"],
)
def test_every_preset_exports_with_a_dynamic_batch_and_equals_eager(
    dtype: torch.dtype, presets: tuple[str, ...]
) -> None:
    model, program = exported(dtype, presets)
    with torch.no_grad():
        for batch in (1, 7):
            expected = model(*inputs(dtype, batch))
            found = program.module()(*inputs(dtype, batch))
            unlike = {
                n: relative(found[n], y) for n, y in expected.items() if not found[n].equal(y)
            }
            # The kernels of a CPU sum in another order, and do not round weights to 16 bits.
            assert max(unlike.values(), default=0.0) < 8 * torch.finfo(dtype).eps, unlike
            if dtype is not torch.float32:
                assert not {"int4", "int8"} & unlike.keys()  # whose op a program keeps


@pytest.mark.parametrize(
    "presets",
    [FORMS, pytest.param(tuple(LINEARS), marks=pytest.mark.exhaustive)],
    ids=["forms", "every"],
)
def test_decompositions_leave_ops_of_torch_only(presets: tuple[str, ...]) -> None:
    dtype = torch.float16
    model, program = exported(dtype, presets)
    assert any("lowbit" in op for op in foreign_ops(program))
    plain = program.run_decompositions(formats.decompositions())
    assert foreign_ops(plain) == []
    found, expected = plain.module()(*inputs(dtype, 7)), model(*inputs(dtype, 7))
    worst = {name: relative(found[name], expected[name]) for name in expected}
    # In 16 bits the kernel does not round the weight, and PyTorch's product does.
    assert max(worst.values()) < 1e-3, worst


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("k", "group"), [(64, 16), (70, 32), (33, 33), (33, 64), (17, 5)])
@pytest.mark.parametrize("zero_point", [False, True])
def test_decomposed_products_match_the_op(bits: int, k: int, group: int, zero_point: bool) -> None:
    torch.manual_seed(0)
    groups, n = -(-k // group), 11
    kind = torch.uint8 if bits == 4 else torch.int8
    width = -(-groups * group // 2) if bits == 4 else groups * group
    low, high = (0, 256) if bits == 4 else (-128, 128)
    codes = torch.randint(low, high, (n, width)).to(kind)
    scale = torch.rand(n, groups) * 0.02
    zeros = torch.randint(-8, 8, (n, groups)).to(torch.int8) if zero_point else None
    x, bias, residual = torch.randn(2, 3, k), torch.randn(n), torch.randn(2, 3, n)
    arguments = (x, codes, scale, zeros, bias, residual, group)
    table = formats.decompositions()
    expected = kernels.weight_linear.reference(*arguments)
    found = table[torch.ops.lowbit.weight_linear.default](*arguments)
    assert relative(found, expected) < 1e-6
    parts = (codes, scale, zeros, group, k, torch.float32)
    values = table[torch.ops.lowbit.dequantize.default](*parts)
    assert torch.equal(values, torch.ops.lowbit.dequantize(*parts))


@pytest.mark.parametrize(
    ("tokens", "dynamic", "packed"), [(1, False, True), (64, False, False), (64, True, True)]
)
def test_int8_rows_take_the_product_that_is_fast(tokens: int, dynamic: bool, packed: bool) -> None:
    """PyTorch's int8 product for few tokens and for a number that may change; else the weight is unpacked."""
    model = nn.Sequential(nn.Linear(FEATURES, 64)).bfloat16().eval()
    lowbit.quantize_(model, lowbit.Int8WeightOnly())
    x = torch.randn(tokens, FEATURES).bfloat16()
    shapes = ({0: torch.export.Dim("tokens", min=1, max=512)},) if dynamic else None
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    plain = program.run_decompositions(formats.decompositions())
    assert any("_weight_int8pack_mm" in str(node.target) for node in plain.graph.nodes) == packed
    assert relative(plain.module()(x), model(x)) < 1e-2


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_decomposed_tables_match_the_op(bits: int) -> None:
    values = [float(v) for v in range(-(2 ** (bits - 1)), 2 ** (bits - 1))]
    packed = torch.randint(0, 256, (5, 9), dtype=torch.uint8)
    arguments = (packed, values, 9 * 8 // bits)
    op = torch.ops.lowbit.table_values.default
    assert torch.equal(formats.decompositions()[op](*arguments), op(*arguments))


# ---- the ops of a saved program ------------------------------------------------------------------------------------

_LOAD = """
import json, sys, torch
import lowbit
before = [name for name in sys.modules if name.startswith("lowbit_kernels.weight_only.weight_linear")]
program = torch.export.load(sys.argv[1])
print(json.dumps([before, program.module()(torch.ones(2, 128, dtype=torch.bfloat16)).float().tolist()]))
"""


def test_a_saved_program_loads_after_import_lowbit(tmp_path: Path) -> None:
    model = network(Int4WeightOnly(32)).bfloat16()
    x = torch.ones(2, FEATURES, dtype=torch.bfloat16)
    with torch.no_grad():
        program = torch.export.export(model, (x,)).run_decompositions({})
    assert "lowbit.weight_linear.default" in foreign_ops(program)
    torch.export.save(program, tmp_path / "model.pt2")
    before, found = printed(forked.run(_LOAD, tmp_path / "model.pt2", folder=tmp_path))
    assert before == []  # the op is defined, and its module waits for the first call
    assert torch.equal(torch.tensor(found), model(x).float())


_BOXED = """
import json, sys, torch
import lowbit
assert "lowbit_kernels.weight_only.weight_linear" not in sys.modules
call, overloads = torch._C._jit_get_operation("lowbit::weight_linear")
print(json.dumps([overloads, call(*torch.load(sys.argv[1])).float().tolist()]))
"""


def test_the_dispatcher_of_torch_finds_an_op_after_import_lowbit(tmp_path: Path) -> None:
    """As a package of AOTInductor calls it, from C++: by its name."""
    layer, x = network(Int4WeightOnly(32)).bfloat16()[0], torch.ones(2, FEATURES).bfloat16()
    weight = layer.weight.detach()
    given = (x, weight.codes, weight.scale, None, layer.bias.detach(), None, 32)
    torch.save(given, tmp_path / "given.pt")
    overloads, found = printed(forked.run(_BOXED, tmp_path / "given.pt", folder=tmp_path))
    assert overloads == [""] and torch.equal(torch.tensor(found), layer(x).float())


_PACKAGE = """
import json, sys, torch
import lowbit
assert "lowbit_kernels.weight_only.weight_linear" not in sys.modules
model = torch._inductor.aoti_load_package(sys.argv[1])
print(json.dumps(model(torch.ones(2, 128, dtype=torch.bfloat16)).float().tolist()))
"""


@needs_compiler
@pytest.mark.exhaustive  # its compiler takes 20 s; the dispatcher does what it needs of lowbit
def test_a_package_of_torchs_own_loads_after_import_lowbit(tmp_path: Path) -> None:
    """It calls lowbit's kernel, so its values are those of eager mode."""
    model = network(Int4WeightOnly(32)).bfloat16()[:1]
    x = torch.ones(2, FEATURES, dtype=torch.bfloat16)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        path = str(tmp_path / "model.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    found = printed(forked.run(_PACKAGE, path, folder=tmp_path))
    assert torch.equal(torch.tensor(found), model(x).float())


# ---- AOTInductor ---------------------------------------------------------------------------------------------------

_WITHOUT_LOWBIT = """
import json, sys, torch
model = torch._inductor.aoti_load_package(sys.argv[1])
torch.save(model(*torch.load(sys.argv[2])), sys.argv[3])
print(json.dumps([name for name in sys.modules if name.split(".")[0] in ("lowbit", "lowbit_kernels")]))
"""


class BothDtypes(nn.Module):
    """Two models of a few presets, in float32 and in bfloat16."""

    def __init__(self, wide: list[str], narrow: list[str]) -> None:
        super().__init__()
        self.wide = every_preset(torch.float32, wide, FEATURES, 16384, ["int8"], ["int8"])
        self.narrow = every_preset(torch.bfloat16, narrow, NARROW, 48, ["int4"], ["float8"])

    def forward(self, x: Tensor, tokens: Tensor, image: Tensor, narrow: Tensor) -> dict[str, Any]:
        half = image.bfloat16()
        return {"wide": self.wide(x, tokens, image), "narrow": self.narrow(narrow, tokens, half)}


NARROW = 140  # the last group of a row is cut


@needs_compiler
@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        # A compiler takes seconds for each preset. So the usual run has one of each kind, and in 16 bits those with a
        # product of their own. The test of the decompositions has more of them.
        (["int4", "int8xint4"], ["int8_groups", "nf4"]),
        pytest.param(list(LINEARS), list(LINEARS), marks=pytest.mark.exhaustive),
    ],
    ids=["one of each kind", "every preset"],
)
def test_a_package_runs_without_lowbit(wide: list[str], narrow: list[str], tmp_path: Path) -> None:
    model, path = BothDtypes(wide, narrow).eval(), tmp_path / "model.pt2"
    first, again = (
        (*inputs(torch.float32, batch), inputs(torch.bfloat16, batch, NARROW)[0])
        for batch in (4, 7)
    )
    report = lowbit.export(model, path, "aoti", example_inputs=first, dynamic_shapes=batch_of(4))
    assert len(report.converted) == len(wide) + len(narrow) + 4
    assert report.nbytes == path.stat().st_size
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]
    # Most of the package is weights of the linears in float32, which would take 4 bytes; 2 MiB are code.
    assert report.nbytes < len(wide) * 16384 * FEATURES * 1.25 + 2**21
    torch.save(again, tmp_path / "inputs.pt")
    files = (path, tmp_path / "inputs.pt", tmp_path / "outputs.pt")
    assert without_lowbit(_WITHOUT_LOWBIT, *files) == []
    found, expected = torch.load(tmp_path / "outputs.pt"), model(*again)
    for part, bound in (("wide", 1e-5), ("narrow", 5e-3)):
        worst = {name: relative(found[part][name], y) for name, y in expected[part].items()}
        assert max(worst.values()) < bound, worst


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda y: y.flip(-1), "relative error of 1"),
        (lambda y: y * torch.nan, "relative error of inf"),
        (lambda y: y[:1], "relative error of inf"),
        (lambda y: y.no_such_method(), "does not run: 'Tensor' object has no"),
    ],
)
def test_a_program_that_computes_something_else_is_not_kept(
    wrong: Callable[[Tensor], Tensor], why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As if the compiler had gone wrong."""
    model, x = network(Int4WeightOnly(32)), torch.randn(3, FEATURES)

    def compile(program: Any, package_path: str) -> None:
        Path(package_path).write_bytes(b"")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile)
    monkeypatch.setattr(
        torch._inductor, "aoti_load_package", lambda path: lambda x: wrong(model(x))
    )
    with pytest.raises(FormatError, match=why) as caught:
        lowbit.export(model, tmp_path / "model.pt2", "aoti", example_inputs=(x,))
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_models_in_float32_are_compared_more_closely(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def exported(model: nn.Module, x: Tensor) -> None:
        load = lambda path: lambda x: model(x) * 1.05  # noqa: E731
        monkeypatch.setattr(torch._inductor, "aoti_load_package", load)
        lowbit.export(model, tmp_path / "model.pt2", "aoti", example_inputs=(x,), overwrite=True)

    def compile(program: Any, package_path: str) -> None:
        Path(package_path).write_bytes(b"")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile)
    x = torch.randn(3, FEATURES)
    exported(network(Int4WeightOnly(32)).bfloat16(), x.bfloat16())
    exported(network(lowbit.Int8DynamicActivationInt4Weight(32)), x)
    with pytest.raises(FormatError, match=r"relative error of 0\.05"):
        exported(network(Int4WeightOnly(32)), x)


@pytest.mark.parametrize(
    ("format", "end"), [("aoti", ".pt2"), ("onnx", ".onnx"), ("executorch", ".pte")]
)
def test_a_file_of_another_end_is_refused(format: str, end: str, tmp_path: Path) -> None:
    model, x = network(Int4WeightOnly(32)), torch.randn(3, FEATURES)
    with pytest.raises(FormatError, match=rf"{format} is a file that ends in {end}, got a.out"):
        lowbit.export(model, tmp_path / "a.out", format, example_inputs=(x,))


def test_programs_with_random_numbers_are_not_compared() -> None:
    ones = torch.ones(3)
    compare("aoti", lambda: [ones * 0], lambda: [torch.randn(3)], 0.3)
    for noise in (0.0, 1e-7):  # the order of sums may change from call to call
        with pytest.raises(FormatError, match="something else"):
            compare("aoti", lambda: [ones * 2], lambda n=noise: [ones + n * torch.rand(3)], 0.3)


def test_example_inputs_may_be_the_output_of_a_layer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = network(Int4WeightOnly(32))
    x = nn.Linear(4, FEATURES)(torch.randn(3, 4))
    monkeypatch.setattr(
        torch._inductor,
        "aoti_compile_and_package",
        lambda program, package_path: Path(package_path).write_bytes(b""),
    )
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: model)
    lowbit.export(model, tmp_path / "model.pt2", "aoti", example_inputs=(x,))
    assert x.requires_grad


@pytest.mark.parametrize(
    ("dtype", "precision", "most"),
    [
        (torch.float32, "highest", TOLERANCE_FLOAT32),
        (torch.float32, "high", TOLERANCE),
        (torch.bfloat16, "highest", TOLERANCE),
    ],
)
def test_narrow_arithmetic_may_differ_by_more(
    dtype: torch.dtype, precision: str, most: float
) -> None:
    model, x = nn.Linear(8, 8, dtype=dtype), torch.randn(2, 8, dtype=dtype)
    program, before = torch.export.export(model, (x,)), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert tolerance_of(program, Call(model, (x,), {}, None)) == most
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_model_whose_program_was_traced_can_be_cast(is_frozen: bool) -> None:
    """torch.export keeps weak references to the tensors that it traces, and torch swaps none that has one."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64, bias=False)).eval()
    model[2].weight = model[0].weight
    lowbit.quantize_(model, lowbit.Int4WeightOnly(32))
    if is_frozen:
        lowbit.inference.freeze_(model)
    x, weight = torch.randn(3, 64), model[0].weight
    expected = model(x)
    program = traced(Call(model, (x,), {}, None))
    assert torch.equal(program.module()(x), expected) and torch.equal(model(x), expected)
    assert model[0].weight is model[2].weight is weight
    assert model.bfloat16()[0].weight.dtype is torch.bfloat16


def test_outputs_of_a_graph_leave_the_model_and_its_inputs_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            x.add_(self.count)
            return x.clone()

    model, x = Counting(), torch.zeros(2)
    call = Call(model, (x,), {}, None)
    program = torch.export.export(model, (x,))
    assert [outputs_of(program, call)[0].tolist() for _ in range(2)] == [[1, 1], [1, 1]]
    assert model.count.item() == 0 and x.tolist() == [0, 0]


def test_a_package_with_ops_of_others_is_refused(tmp_path: Path) -> None:
    @torch.library.custom_op("lowbit_tests::own_double", mutates_args=())
    def own_double(x: Tensor) -> Tensor:
        return 2 * x

    own_double.register_fake(torch.empty_like)

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(Int4WeightOnly(32))

        def forward(self, x: Tensor) -> Tensor:
            return own_double(self.inner(x))

    with pytest.raises(FormatError, match=r"would need lowbit_tests\.own_double\.default in the"):
        lowbit.export(Doubled().eval(), tmp_path / "m.pt2", "aoti", example_inputs=(X,))
    assert list(tmp_path.iterdir()) == []


# ---- C++ -----------------------------------------------------------------------------------------------------------


@pytest.mark.pages
@needs_compiler
def test_the_program_of_the_page_loads_a_package(tmp_path: Path) -> None:
    """docs/runtimes.md has the C++; it is compiled with torch's headers and run without Python."""
    page = (ROOT / "docs/runtimes.md").read_text(encoding="utf-8")
    code = page.partition("```cpp\n")[2].partition("```")[0]
    (tmp_path / "main.cpp").write_text(code)
    model = network(Int4WeightOnly(32))
    example = torch.ones(3, FEATURES)
    lowbit.export(model, tmp_path / "model.pt2", "aoti", example_inputs=(example,))
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    command = [*host_compiler.compiler(), "-std=c++20", "main.cpp", "-o", "main"]
    command += [f"-I{torch_folder / 'include'}", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10"]
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 240}
    built = subprocess.run(command, **options)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(tmp_path / "main"), "model.pt2"], **options)
    assert done.returncode == 0, done.stderr
    found = torch.tensor([float(line) for line in done.stdout.split()])
    expected = model(example).flatten()
    assert relative(found, expected) < 1e-5
