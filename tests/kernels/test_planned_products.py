"""Products of frozen weights as launch plans: which calls have one, and what it computes, emulated on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks.cases.weight_linear import Case
from lowbit_kernels.composed import dynamic_linear, expert_linear
from lowbit_kernels.invariant import invariant_linear
from lowbit_kernels.runtime import launch_plan, launcher, nvrtc, triton_runtime
from lowbit_kernels.runtime.launch_plan import Address, Launch, LaunchPlan, TritonKernel
from lowbit_kernels.weight_only import weight_linear, weight_mm_experts_sm90
from lowbit_kernels.weight_only.one_launch import OneLaunch
from lowbit_kernels.weight_only.pairs_by_expert import PairsByExpert
from lowbit_kernels.weight_only.weight_operands import all_described, layout
from tests.kernels import decode_emulator, emulator, scaled_mm_emulator, sm90_emulator
from tests.kernels.compiled_on_cpu import COMPILER

EMULATORS = {"decode": decode_emulator, "large_batch": sm90_emulator}


def plan_of(arguments: tuple, implementation: str) -> weight_linear.WeightLinearPlan:
    """The plan for the op's arguments, as on an H200."""
    x, codes, scale, zero, bias, residual, group = arguments
    described = all_described(x, codes, scale, zero, bias, residual, None)
    with (
        mock.patch.object(nvrtc, "runs_on_hopper", lambda device: True),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: 132),
    ):
        return weight_linear.planned.__wrapped__(described, group, implementation=implementation)


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("implementation", "m"), [("decode", 3), ("large_batch", 20)])
def test_a_plan_computes_what_the_op_does(implementation: str, m: int, bits: int) -> None:
    torch.manual_seed(0)
    case = Case("", m, 48, 128, 64, bits, leading=(2,), bias=True, residual=True)
    arguments = case.arguments()
    with EMULATORS[implementation].emulated():
        plan = plan_of(arguments, implementation)
        assert plan.implementation == implementation and plan.launches is plan.launches
        (y,) = launch_plan.run(plan.launches, (*arguments[:6], None))
    expected = weight_linear.reference(*arguments)
    assert y.shape == expected.shape == (2, m, 48) and y.dtype == expected.dtype
    assert (y.double() - expected.double()).norm() < 4e-3 * expected.double().norm()


class OneProduct(OneLaunch):
    def __init__(self, is_ready: bool = True, copies_x: bool = False) -> None:
        self.shape, self.dtype, self.is_ready, self.copies_x = (
            (1, 1),
            torch.half,
            is_ready,
            copies_x,
        )

    def launch(self) -> Launch:
        return Launch(TritonKernel(1, 0), 1, 32, tuple(map(Address, range(9))))


def test_calls_that_copy_an_operand_have_no_plan() -> None:
    def plan(product: object, copies: bool = False) -> LaunchPlan | None:
        return weight_linear.WeightLinearPlan(
            "decode", product, (1, 1), True, False, copies
        ).launches

    assert plan(OneProduct()).launches[0].arguments == (
        *map(Address, range(6)),
        *(0, Address(6), Address(7)),  # the op has no scales of tokens
    )
    assert plan(OneProduct(), copies=True) is None
    assert plan(OneProduct(is_ready=False)) is None and plan(OneProduct(copies_x=True)) is None
    assert plan(lambda tensors: tensors[0]) is None  # in several launches

    case = Case("", 2, 16, 64, 32, leading=(2,), bias=True, residual=True)
    x, codes, scale, zero, bias, residual, group = case.arguments()
    apart = torch.stack([bias, bias], 1)[:, 0], residual.mT.contiguous().mT
    for addends, copies in (
        ((bias, residual), False),
        ((apart[0], residual), True),
        ((bias, apart[1]), True),
    ):
        described = all_described(x, codes, scale, zero, *addends, None)
        assert weight_linear.planned.__wrapped__(described, group).copies == copies


@pytest.mark.parametrize("change", [None, "x", "zero_point", "bias", "ids", "scale"])
def test_calls_of_experts_that_copy_an_operand_have_no_plan(change: str | None) -> None:
    tensors = {
        "x": torch.randn(4, 64, dtype=torch.half),
        "codes": torch.zeros(3, 8, 32, dtype=torch.uint8),
        "scale": torch.ones(3, 8, 2),
        "zero_point": torch.zeros(3, 8, 2, dtype=torch.int8),
        "ids": torch.zeros(8, dtype=torch.int64),
        "bias": torch.zeros(3, 8, dtype=torch.half),
    }
    if change is not None:
        given = tensors[change]
        tensors[change] = torch.stack([given, given], -1)[..., 0]
    product = SimpleNamespace(launches=lambda: LaunchPlan((), (), ()))
    with mock.patch.object(weight_mm_experts_sm90, "product", lambda operands: product):
        plan = expert_linear.planned.__wrapped__(all_described(*tensors.values(), None), 32)
    assert plan.implementation == "decode" and plan.copies == (change is not None)
    assert (plan.launches is None) == (change is not None)


def test_sorting_and_gathering_as_launches() -> None:
    pytest.importorskip("triton")
    x = torch.randn(4, 2, 60, dtype=torch.half)[:, 0]
    pairs = PairsByExpert(8, 3, layout(x))
    assert pairs.launches(0, 5, (8, 9, 10)) == []
    for number, kernel in enumerate((pairs.route, pairs.gather)):
        compile_as_if(kernel, number)
    route, gather = pairs.launches(0, 5, (8, 9, 10))
    assert route == Launch(
        *(TritonKernel(0, 64), 4, 64),
        (Address(5), Address(8), Address(9), 8, 3, 0, 0),
    )
    assert gather == Launch(
        *(TritonKernel(1, 64), 8, 64),
        (Address(0), Address(8), Address(10), 60, 2, 120, 64, 0, 0),
    )
    assert [b.shape for b in pairs.buffers] == [(8,), (3,), (8, 64)]
    for number in (0, 1):
        triton_runtime._launched.pop(number)


def test_the_launcher_learns_the_plan_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that there is none, so that Python runs the next one at once."""
    learnt: list[tuple[str, LaunchPlan | None]] = []
    monkeypatch.setattr(launcher, "learn", lambda name, plan: learnt.append((name, plan)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True), raising=False)
    monkeypatch.setattr(weight_linear, "planned", lambda *a: found)
    case = Case("", 2, 16, 64, 32)
    x, *rest = case.arguments()
    with sm90_emulator.launches_on_cpu(launch_plan):
        found = weight_linear.WeightLinearPlan("decode", lambda tensors: x, (1, 1), True, False)
        assert weight_linear.run(x, *rest) is x
        assert learnt == [("weight_linear", None)]
        ran: list[tuple] = []
        kernel = lambda *a: ran.append(a)  # noqa: E731
        product = OneProduct()
        product.launch = lambda: Launch(kernel, 7, 32, (Address(0), Address(8)))
        found = weight_linear.WeightLinearPlan("decode", product, (1, 1), True, False)
        y = weight_linear.run(x, *rest)
    assert learnt[1] == ("weight_linear", found.launches)
    assert ran == [(0, 7, 32, x.data_ptr(), y.data_ptr())] and y.dtype == torch.half


def dynamic(m: int, n: int = 48, k: int = 128, **options: bool) -> tuple:
    """The operands of a dynamic linear of int8: those of the op, in its order."""
    codes, scale = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n, 1) + 0.5
    x, residual = (torch.randn(2, m, size).bfloat16() for size in (k, n))
    bias = torch.randn(n).bfloat16()
    addends = (
        one if options.get(name, True) else None
        for name, one in (("bias", bias), ("residual", residual))
    )
    return x, codes, scale / k, *addends, None, None


def dynamic_plan(operands: Sequence) -> dynamic_linear.DynamicLinearPlan:
    """The plan for operands of these layouts on an H200; its launches take tensors of a CPU."""
    described = all_described(*operands)
    on_gpu = [one and (*one[:3], torch.device("cuda"), one[4]) for one in described]
    plan = dynamic_linear.planned.__wrapped__(tuple(on_gpu))
    plan.operands = tuple(layout(t) for t in operands)
    return plan


def test_a_dynamic_linear_without_a_plan_is_learnt_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that Python runs the next call at once, and does not look for a plan again."""
    learnt: list[tuple[str, LaunchPlan | None]] = []
    monkeypatch.setattr(launcher, "learn", lambda name, plan: learnt.append((name, plan)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True), raising=False)
    monkeypatch.setattr(dynamic_linear, "result_of", lambda plan, operands, *rest: operands[0])
    x, codes, scale, bias, residual, *_ = dynamic(3)
    with sm90_emulator.launches_on_cpu(launch_plan):
        y = dynamic_linear._run(x, codes, scale, bias, residual, False, None, 0, None)
    assert y is x and learnt == [("dynamic_linear", None)]


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("implementation", "m", "residual", "launches"),
    [("decode", 3, True, 1), ("large_batch", 20, True, 2), ("scaled_mm", 40, False, 2)],
)
def test_a_plan_of_a_dynamic_linear(
    implementation: str, m: int, residual: bool, launches: int
) -> None:
    torch.manual_seed(0)
    operands = dynamic(m, residual=residual)
    with (
        mock.patch.object(nvrtc, "runs_on_hopper", lambda device: True),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: 132),
        decode_emulator.emulated(),
        sm90_emulator.emulated(),
        scaled_mm_emulator.emulated(),
        emulator.rows_quantization(),
    ):
        plan = dynamic_plan(operands)
        assert plan.implementation == implementation
        found = plan.launches
        assert len(found.launches) == launches and len(found.scratch) == launches - 1
        (y,) = launch_plan.run(found, operands)
    expected = dynamic_linear.reference(*operands[:5], False, None, 0, None)
    assert y.shape == expected.shape and y.dtype == expected.dtype
    assert (y.double() - expected.double()).norm() < 4e-3 * expected.double().norm()


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("implementation", "m", "biased"),
    [("decode", 3, True), ("decode", 3, False), ("scaled_mm", 40, False), ("scaled_mm", 40, True)],
)
def test_a_plan_of_an_invariant_linear(implementation: str, m: int, biased: bool) -> None:
    """It has the bits of the formula. The sum with a bias after `scaled_mm` is a pass of its own, without a plan."""
    torch.manual_seed(0)
    operands = dynamic(m, bias=biased)[:4]
    with (
        mock.patch.object(nvrtc, "runs_on_hopper", lambda device: True),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: 132),
        decode_emulator.emulated(),
        scaled_mm_emulator.emulated(),
        emulator.rows_quantization(),
    ):
        described = all_described(*operands)
        on_gpu = [one and (*one[:3], torch.device("cuda"), one[4]) for one in described]
        plan = invariant_linear.planned.__wrapped__(tuple(on_gpu))
        assert plan.implementation == implementation
        plan.operands = (*map(layout, operands[:3]), plan.operands[3], None, None, None)
        found = invariant_linear.launches(plan, biased)
        if implementation == "scaled_mm" and biased:
            assert found is None
            return
        (y,) = launch_plan.run(found, operands)
    assert torch.equal(y, invariant_linear.reference(*operands))


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
def test_a_scale_in_16_bits_is_widened_by_a_launch_of_the_plan() -> None:
    pytest.importorskip("triton")
    x, codes, scale, *others = dynamic(40, n=1104, residual=False)
    with (
        mock.patch.object(nvrtc, "runs_on_hopper", lambda device: True),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: 132),
        scaled_mm_emulator.emulated(),
        emulator.rows_quantization(),
    ):
        plan, early = (dynamic_plan((x, codes, scale.bfloat16(), *others)) for _ in range(2))
        assert early.launches is None  # before Triton has compiled
        compile_as_if(plan._widen, 5)
        _, widen, multiply = plan.launches.launches
        assert plan.launches is plan.launches
    triton_runtime._launched.pop(5)
    assert widen.kernel == TritonKernel(5, 64) and widen.grid == 2
    scale_at, out, *rest = widen.arguments
    assert scale_at == Address(dynamic_linear.SCALE) and rest == [1104, 0, 0]
    assert out in multiply.arguments and scale_at not in multiply.arguments


def compile_as_if(kernel: triton_runtime.KeptKernel, number: int) -> None:
    """Give the kernel what Triton compiles."""
    metadata = {"num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0, "shared": 64}
    metadata |= {"launch_cooperative_grid": False, "launch_pdl": False, "num_warps": 2}
    kinds = {n: "constexpr" if n in kernel.constants else "i32" for n in kernel.kernel.arg_names}
    kernel._compiled = SimpleNamespace(
        metadata=SimpleNamespace(**metadata),
        src=SimpleNamespace(signature=kinds),
        function=number,
    )


@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("change", [None, "residual", "x", "bias", "scale", "16 bits", "k"])
def test_dynamic_linears_that_copy_an_operand_have_no_plan(change: str | None) -> None:
    operands = [*dynamic(40, k=120 if change == "k" else 128, residual=change == "residual")]
    at = {"x": 0, "bias": 3, "scale": 2}.get(change)
    if at is not None:
        operands[at] = torch.stack([operands[at]] * 2, -1)[..., 0]
    if change == "16 bits":
        operands[2] = operands[2].half()
    with (
        mock.patch.object(nvrtc, "runs_on_hopper", lambda device: True),
        mock.patch.object(nvrtc, "multiprocessors", lambda device: 132),
        scaled_mm_emulator.emulated(),
        emulator.rows_quantization(),
    ):
        plan = dynamic_plan(operands)
        assert plan.implementation == "scaled_mm"
        assert (plan.launches is None) == (change is not None)
