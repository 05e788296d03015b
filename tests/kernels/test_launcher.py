"""The compiled launcher on CPU tensors. torch's dispatcher calls it; functions of this test stand for the driver."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowbit_kernels.runtime import (
    host_compiler,
    launch_plan,
    launcher,
    launches,
    triton_runtime,
)
from lowbit_kernels.runtime.launch_plan import (
    Address,
    Buffer,
    CublasProduct,
    Launch,
    LaunchPlan,
    Map,
    TensorPart,
)

pytestmark = pytest.mark.skipif(not host_compiler.compiler(), reason="needs a C++ compiler")

SPACE = "lowbit_launcher_test"
SCHEMA = (
    "(Tensor x, str name, bool flag, Tensor? y, ScalarType dtype, SymInt size=1, float low=0.0, float[] table=[]) "
    "-> (Tensor, Tensor)"
)


class Config(ctypes.Structure):
    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)),
    )


class Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 3),
        ("rest", ctypes.c_char * 52),
    )


class Driver:
    """Records what the launcher asks of CUDA. A launch adds 1 to the bytes of its second argument's tensor."""

    def __init__(self) -> None:
        self.device, self.has_context, self.launched, self.maps = -1, True, [], []
        self.attributes: list[list[tuple]] = []
        self.torch_device, self.held, self.fails = -1, 0, False
        pointer, number = ctypes.c_void_p, ctypes.c_uint64
        kinds = (
            (self.torch_s_device, (ctypes.POINTER(ctypes.c_int32),)),
            (self.current_stream, (ctypes.c_int32, ctypes.POINTER(pointer))),
            (self.current_device, (ctypes.POINTER(ctypes.c_int),)),
            (self.retain_context, (ctypes.POINTER(pointer), ctypes.c_int)),
            (self.set_context, (pointer,)),
            (self.release_context, (ctypes.c_int,)),
            (self.set_bytes, (number, ctypes.c_ubyte, ctypes.c_size_t, pointer)),
            (self.set_words, (number, ctypes.c_uint32, ctypes.c_size_t, pointer)),
            (self.launch, (ctypes.POINTER(Config), pointer, ctypes.POINTER(pointer), pointer)),
            (
                self.encode_map,
                (
                    *(pointer, ctypes.c_int, ctypes.c_uint32, pointer),
                    *(ctypes.POINTER(number), ctypes.POINTER(number)),
                    *(ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32)),
                    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
                ),
            ),
        )
        self.kept = [ctypes.CFUNCTYPE(ctypes.c_int, *types)(method) for method, types in kinds]

    def addresses(self, scaled_mm: int) -> list[int]:
        first, *others = [ctypes.cast(function, ctypes.c_void_p).value for function in self.kept]
        return [first, scaled_mm, *others]

    def current_stream(self, device, to):
        to[0] = 77
        return 0

    def current_device(self, to):
        to[0] = self.device
        return 0 if self.has_context else 201  # CUDA_ERROR_INVALID_CONTEXT

    def torch_s_device(self, to):
        to[0] = self.torch_device
        return 0

    def retain_context(self, to, device):
        to[0] = 1000 + device
        self.held += 1
        return 0

    def release_context(self, device):
        self.held -= 1
        return 0

    def set_context(self, context):
        self.has_context, self.device = True, context - 1000
        return 0

    def set_bytes(self, address, value, count, stream):
        ctypes.memset(address, value, count)
        return 0

    def set_words(self, address, value, count, stream):
        (ctypes.c_uint32 * count).from_address(address)[:] = [value] * count
        return 0

    def launch(self, config, function, pointers, extra):
        if self.fails:
            return 719
        config = config[0]
        given = (
            (Attribute * config.count).from_address(config.attributes or 0) if config.count else ()
        )
        self.attributes.append([(one.id, tuple(one.value)) for one in given])
        values = [ctypes.cast(pointers[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in range(4)]
        self.launched.append(
            (function, config.grid[0], config.block[0], config.shared, config.stream, config.count)
        )
        scratch, result = values[1], values[2]
        first = ctypes.cast(scratch, ctypes.POINTER(ctypes.c_int32))
        first[0] += 1
        ctypes.memmove(result, scratch, 4)  # the number of launches since `scratch` was set to 0
        self.launched[-1] += (values[0], values[3])
        return 0

    def encode_map(self, to, kind, rank, address, sizes, strides, box, steps, *modes):
        self.maps.append(
            (kind, rank, address, *sizes[0:2], strides[0], *box[0:2], *steps[0:2], *modes)
        )
        ctypes.memset(to, 7, 128)
        return 0


KERNEL = SimpleNamespace(handle=4242, shared=100, overlaps=True, cluster=1)


def plan_for(x: torch.Tensor, dtype: torch.dtype) -> LaunchPlan:
    """Operands have the numbers 0 and 1, results 2 and 3, scratch 4."""
    arguments = (12345, Address(4), Address(2, 4), Map(0, 4, 6, 8, 8, 2, 32, 16))
    return LaunchPlan(
        (Buffer((3, 2), torch.int32), Buffer((0, 0), dtype)),
        (Buffer((2,), torch.int32, fill=0, filled=1),),
        (Launch(KERNEL, 5, 64, arguments), Launch(KERNEL, 6, 32, arguments)),
    )


def product_of(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> LaunchPlan:
    """x @ y.T of float8, scaled by 1, and the ones that it was scaled by."""
    m, n = x.shape[0], y.shape[0]
    return LaunchPlan(
        (Buffer((m, n), dtype), Buffer((1,), torch.float32, fill=1)),
        (),
        (
            CublasProduct(
                TensorPart(0, tuple(x.shape)),
                TensorPart(1, tuple(y.shape)),
                *(TensorPart(3, ()),) * 2,
                None,
                TensorPart(2, (m, n)),
            ),
        ),
    )


@pytest.fixture(scope="module")
def op():
    """(the op, its driver, the calls that Python ran, the number of its plans)."""
    namespace = torch.library.Library(SPACE, "DEF")
    calls: list[str] = []
    driver = Driver()
    names = launcher.TORCH_FUNCTIONS[:-1]  # the last asks for a GPU
    folder = Path(torch.__file__).parent / "lib"
    shim = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
    (scaled_mm,) = launcher.addresses_of(shim, ("aoti_torch_cpu__scaled_mm_out",))
    functions = [*launcher.addresses_of(shim, names), *driver.addresses(scaled_mm)]
    library = launcher.loaded(functions, "cpu")

    def in_python(x, name, flag, y, dtype, size=1, low=0.0, table=()):
        calls.append(name)
        if name == "refused":
            launcher.tell(ValueError("the name is refused"))
            raise ValueError("the name is refused")
        if name == "nothing to plan":
            library.learn(0, (ctypes.c_int64 * 1)(*launcher.encoded(None)))
            return torch.empty(0), torch.empty(0)
        plan = product_of(x, y, dtype) if name == "product" else plan_for(x, dtype)
        plan = found.plan if name == "given" else plan
        words = launcher.encoded(plan)
        if name != "unplanned":
            library.learn(0, (ctypes.c_int64 * len(words))(*words))
        return torch.full((3, 2), -1, dtype=torch.int32), torch.empty(0, 0, dtype=dtype)

    for name in ("op", launcher.python_name("op")):
        namespace.define(name + SCHEMA)
    namespace.impl(launcher.python_name("op"), in_python, "CPU")
    launcher.register(library, 0, "op", launcher.letters(SCHEMA), b"CPU", SPACE)
    kept, launcher._launcher = launcher._launcher, library
    found = SimpleNamespace(
        namespace=namespace,  # which would take its ops along
        call=getattr(torch.ops, SPACE).op.default,
        driver=driver,
        calls=calls,
        plans=lambda: library.plans_of(0),
    )
    yield found
    launcher._launcher = kept


def test_there_is_room_for_so_many_ops(op):
    with pytest.raises(RuntimeError, match="no room for more: raise MOST_OPS"):
        launcher.register(launcher._launcher, 32, "more", launcher.letters(SCHEMA), b"CPU", SPACE)


def test_the_second_call_runs_the_plan(op):
    x, y = torch.randn(6, 8), torch.randn(3)
    op.calls.clear(), op.driver.launched.clear(), op.driver.maps.clear()
    first, _ = op.call(x, "planned", True, y, torch.bfloat16)
    assert op.calls == ["planned"] and (first == -1).all() and op.driver.launched == []
    result, empty = op.call(x, "planned", True, y, torch.bfloat16)
    assert op.calls == ["planned"]
    assert (result.shape, result.dtype) == ((3, 2), torch.int32)
    assert result.flatten()[1] == 2  # both launches ran, on scratch that began at 0
    assert (empty.shape, empty.dtype) == ((0, 0), torch.bfloat16)
    word = 0x0707070707070707
    assert op.driver.launched == [
        (4242, 5, 64, 100, 77, 1, 12345, word),
        (4242, 6, 32, 100, 77, 1, 12345, word),
    ]
    one = (2, 2, x.data_ptr() + 16, 8, 6, 32, 32, 2, 1, 1, 0, 3, 3, 0)
    assert op.driver.maps == [one, one]


@pytest.mark.parametrize(
    "change",
    (
        *("shape", "strides", "alignment", "dtype", "none"),
        *("other dtype", "string", "flag", "scalar", "size", "float", "list", "shorter list"),
    ),
)
def test_a_call_that_differs_is_planned_anew(op, change):
    x, y, name, flag, dtype = torch.randn(6, 8), torch.randn(3), "planned", True, torch.bfloat16
    for _ in range(2):
        op.call(x, name, flag, y, dtype)
    x = {
        "shape": torch.randn(5, 8),
        "strides": torch.randn(8, 6).t(),
        "alignment": torch.randn(49)[1:].view(6, 8),
        "dtype": torch.randn(6, 8).double(),
    }.get(change, x)
    y = {"none": None, "other dtype": y.half()}.get(change, y)
    name = {"string": f"planned {change}"}.get(change, name)
    flag, dtype = flag ^ (change == "flag"), torch.float16 if change == "scalar" else dtype
    numbers = {
        "size": (2**33, 0.0),
        "float": (1, -0.5),
        "list": (1, 0.0, [0.5, -1.0]),
        "shorter list": (1, 0.0, [0.5]),
    }.get(change, (1, 0.0))
    op.calls.clear()
    op.call(x, name, flag, y, dtype, *numbers)
    assert op.calls == [name]
    op.call(x, name, flag, y, dtype, *numbers)
    assert op.calls == [name]


def test_python_runs_what_has_no_plan(op):
    x = torch.randn(4, 4)
    op.calls.clear()
    for _ in range(3):
        op.call(x, "unplanned", False, None, torch.int8)
    assert op.calls == ["unplanned"] * 3


def test_python_runs_on_another_device(op):
    x = torch.randn(2, 2)
    op.call(x, "planned", False, None, torch.int8)
    op.calls.clear()
    op.driver.device = 1
    try:
        op.call(x, "planned", False, None, torch.int8)
    finally:
        op.driver.device = -1
    assert op.calls == ["planned"]


def test_a_thread_without_a_context_gets_the_device_s(op):
    x = torch.randn(2, 4)
    op.call(x, "planned", False, None, torch.int8)
    op.calls.clear()
    op.driver.has_context, op.driver.device = False, 5
    op.call(x, "planned", False, None, torch.int8)
    assert op.calls == [] and op.driver.has_context and op.driver.device == -1
    assert op.driver.held == 0
    op.driver.has_context, op.driver.torch_device = False, 1
    try:
        op.call(x, "planned", False, None, torch.int8)  # the thread's device is another one
    finally:
        op.driver.torch_device = -1
    assert op.calls == ["planned"] and not op.driver.has_context
    op.driver.has_context = True


def test_python_runs_while_calls_are_counted(op):
    x = torch.randn(2, 3)
    for _ in range(2):
        op.call(x, "planned", False, None, torch.int8)
    op.calls.clear()
    with launches.counted():
        op.call(x, "planned", False, None, torch.int8)
    assert op.calls == ["planned"]
    op.call(x, "planned", False, None, torch.int8)
    assert op.calls == ["planned"]


def test_an_error_reaches_the_caller_and_leaves_nothing_behind(op):
    x = torch.randn(2, 5)
    with pytest.raises(RuntimeError, match=r"^ValueError: the name is refused"):
        op.call(x, "refused", False, None, torch.int8)
    op.calls.clear()
    for _ in range(2):
        op.call(x, "planned", False, None, torch.int8)
    assert op.calls == ["planned"]


def test_python_runs_a_call_that_the_launcher_cannot_finish(op):
    """As where memory runs out: nothing of the failed call stays behind."""
    x, y = torch.randn(3, 9), torch.randn(2)
    for _ in range(2):
        op.call(x, "planned", True, y, torch.int8)
    op.calls.clear()
    before = x._use_count(), y._use_count()
    op.driver.fails = True
    try:
        for _ in range(5):
            result, _ = op.call(x, "planned", True, y, torch.int8)
    finally:
        op.driver.fails = False
    assert op.calls == ["planned"] * 5 and (result == -1).all()
    assert (x._use_count(), y._use_count()) == before


def test_a_product_by_torch(op):
    """Also of a part of a larger tensor, whose memory begins later."""
    x, y = (torch.randn(rows, 32).to(torch.float8_e4m3fn) for rows in (40, 48))
    parts = x[8:], y[16:]
    for _ in range(2):
        op.calls.clear()
        out, ones = op.call(parts[0], "product", False, parts[1], torch.bfloat16)
    assert op.calls == [] and ones.tolist() == [1.0]
    expected = (parts[0].float() @ parts[1].float().T).to(torch.bfloat16)
    torch.testing.assert_close(out, expected)
    assert [t._use_count() for t in (*parts, out)] == [1, 1, 1]


def test_a_result_without_elements_is_new_at_each_call(op):
    """Also where the plan was learned, or the last call ran, in inference mode."""
    x = torch.randn(5, 3)
    for learned_in in (torch.inference_mode, torch.no_grad):
        x = torch.randn(len(x) + 8, 3)
        with learned_in():
            op.call(x, "planned", False, None, torch.float16)
        with torch.inference_mode():
            op.call(x, "planned", False, None, torch.float16)
        results = [op.call(x, "planned", False, None, torch.float16)[1] for _ in range(2)]
        assert results[0] is not results[1]
        results[0].requires_grad_()
        results.append(op.call(x, "planned", False, None, torch.float16)[1])
        assert [t.requires_grad for t in results] == [True, False, False]
        for t in results:
            assert t.shape == (0, 0) and t.dtype == torch.float16 and t.is_contiguous()
            assert not t.is_inference() and t._version == 0 and t._use_count() == 1


def test_operands_without_a_plan_are_remembered(op):
    x = torch.randn(3, 11)
    op.call(x, "nothing to plan", True, None, torch.int8)
    plans = op.plans()
    op.calls.clear()
    op.call(x, "nothing to plan", True, None, torch.int8)
    assert op.calls == ["nothing to plan"] and op.plans() == plans


def test_the_exception_of_python_reaches_the_caller():
    """`called` raises it, whatever the launcher has made of it; once, and nothing runs twice."""
    ran = []

    def run(x):
        ran.append(x)
        raise KeyboardInterrupt("now")

    kept = launcher._keeping_error(run)

    def op(x):
        try:
            kept(x)
        except BaseException:
            raise RuntimeError("of the launcher") from None

    with pytest.raises(KeyboardInterrupt, match="now"):
        launcher.called(op, 1)
    assert ran == [1] and launcher._raised.error is None
    with pytest.raises(RuntimeError, match="of the launcher"):
        op(2)
    assert launcher._raised.error is None  # nobody asked for it

    def outer(x):
        try:
            launcher._keeping_error(lambda x: launcher.called(op, x))(x)
        except BaseException:
            raise RuntimeError("of the launcher") from None

    with pytest.raises(KeyboardInterrupt, match="now"):
        launcher.called(outer, 3)


def compiled(**changes) -> SimpleNamespace:
    """What Triton tells of a compiled kernel with the arguments x, rows, one, out and SIZE; `one` was 1."""
    scratch = {"num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0}
    scratch |= {"launch_cooperative_grid": False, "launch_pdl": False, "shared": 96, "num_warps": 4}
    kinds = {"x": "*fp32", "rows": "i32", "one": "constexpr", "out": "*fp32", "SIZE": "constexpr"}
    return SimpleNamespace(
        metadata=SimpleNamespace(**scratch | changes),
        src=SimpleNamespace(signature=kinds),
        function=4242,
    )


def test_a_launch_of_triton_as_a_plan():
    x, out = torch.randn(3), torch.randn(3)
    arguments = {"x": x, "rows": 7, "one": 1, "out": out}
    for overlaps in (False, True):
        kernel = compiled(launch_pdl=overlaps)
        launch = triton_runtime._planned(kernel, 5, arguments, (None, x, out))
        assert launch.arguments == (Address(1), 7, Address(2), 0, 0)
        assert (launch.grid, launch.threads) == (5, 128)
        assert launch.kernel == triton_runtime.TritonKernel(4242, 96, 1, overlaps)
        numbered = arguments | {"x": Address(3, 8), "out": Address(1)}
        launch = triton_runtime._planned(kernel, 5, numbered)
        assert launch.arguments == (Address(3, 8), 7, Address(1), 0, 0)
    (word,) = triton_runtime._planned(kernel, 5, arguments | {"rows": -2.5}, (x, out)).arguments[
        1:2
    ]
    assert word == 0xC0200000  # of float32


def test_launches_that_triton_looks_up_once(monkeypatch):
    """Another dtype, alignment, divisor, constant or option is another kernel; other sizes and floats are not."""
    looked_up: list[tuple] = []
    launched: list[tuple] = []

    class Kernel:
        arg_names = ("x", "size", "factor", "BLOCK")

        def __getitem__(self, grid):
            def launch(*arguments, **named):
                looked_up.append((grid, *arguments[1:], *named.values()))
                return compiled

            return launch

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments: launched.append((grid, *arguments[1:]))

    compiled, kernel = Compiled(), Kernel()
    monkeypatch.setattr(triton_runtime, "_kept", {})
    monkeypatch.setattr(triton_runtime, "_is_known", lambda: True)
    x = torch.randn(64)

    def launch(x=x, size=32, factor=0.5, block=64, warps=4):
        looked_up.clear(), launched.clear()
        given = (x, size, factor), {"BLOCK": block}
        triton_runtime.launch_kept(kernel, (7, 2), *given, num_warps=warps)
        return bool(looked_up)

    assert launch() and looked_up == [((7, 2), 32, 0.5, 64, 4)]
    assert not launch(size=48, factor=2.0) and launched == [((7, 2, 1), 48, 2.0, 64)]
    for change in (
        *({"x": x.half()}, {"x": x[1:]}, {"size": 33}, {"size": 1}, {"size": 2**31}),
        *({"block": 32}, {"warps": 8}),
    ):
        assert launch(**change) and not launch(**change), change


def test_launches_of_triton_that_are_not_planned():
    x, out = torch.randn(3), torch.randn(3)
    arguments = {"x": x.clone(), "rows": 7, "one": 1, "out": out}
    assert triton_runtime._planned(compiled(), 5, arguments, (x, out)) is None  # of a copy
    arguments["x"] = x
    assert (
        triton_runtime._planned(compiled(), 5, arguments, (x, x, out)) is None
    )  # may differ later
    others = {"num_ctas": 2, "global_scratch_size": 64, "profile_scratch_size": 8}
    others |= {"launch_cooperative_grid": True}
    for name, value in others.items():
        kernel = compiled(**{name: value})
        assert triton_runtime._planned(kernel, 5, arguments, (x, out)) is None


@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("overlaps", [False, True])
def test_attributes_of_a_launch(op, cluster, overlaps):
    kernel = SimpleNamespace(handle=1, shared=0, overlaps=overlaps, cluster=cluster)
    plan = LaunchPlan(
        (Buffer((3, 2), torch.int32), Buffer((1,), torch.int8)),
        (Buffer((2,), torch.int32),),
        (Launch(kernel, 8, 32, (0, Address(4), Address(2), 0)),),
    )
    x, op.plan = torch.randn(overlaps + 1, cluster), plan
    op.driver.launched.clear(), op.driver.attributes.clear()
    for _ in range(2):
        op.call(x, "given", True, None, torch.int8)
    wanted = [(6, (1, 0, 0))] * overlaps + [(4, (cluster, 1, 1))] * (cluster > 1)
    assert op.driver.attributes == [wanted]


@pytest.mark.parametrize(
    ("size", "width", "swizzle"), [(1, 32, 1), (2, 32, 2), (1, 128, 3), (1, 48, 0), (8, 16, 0)]
)
def test_boxes_of_a_tensor_map(op, size, width, swizzle):
    """As `tensor_map` swizzles them."""
    one = Map(0, size, 4, 64, 64, 2, width)
    plan = LaunchPlan(
        (Buffer((3, 2), torch.int32), Buffer((1,), torch.int8)),
        (Buffer((2,), torch.int32),),
        (Launch(KERNEL, 8, 32, (0, Address(4), Address(2), one)),),
    )
    x, op.plan = torch.randn(size, width), plan
    op.driver.maps.clear()
    for _ in range(2):
        op.call(x, "given", True, None, torch.int8)
    assert [each[-3] for each in op.driver.maps] == [swizzle]


def test_limits_of_a_launch():
    many = Launch(KERNEL, 1, 32, (0,) * 33)
    maps = Launch(KERNEL, 1, 32, (Map(0, 1, 1, 1, 1, 1, 1),) * 5)
    for launch in (many, maps):
        with pytest.raises(ValueError, match="at most 32 and 4"):
            launcher.encoded(LaunchPlan((), (), (launch,)))


def test_tensors_are_freed(op):
    x = torch.randn(7, 7)
    for _ in range(3):
        results = op.call(x, "planned", True, x, torch.int8)
    before = sys.getrefcount(x), x._use_count()
    for _ in range(50):
        results = op.call(x, "planned", True, x, torch.int8)
    assert (sys.getrefcount(x), x._use_count()) == before
    assert all(t._use_count() == 1 for t in results)


def test_shapes_that_keep_changing_do_not_fill_the_memory(op):
    for size in range(1, 8400):
        op.call(torch.empty(size), "planned", True, None, torch.int8)
    assert 0 < op.plans() <= 8192


def test_run_in_python_does_the_same(op):
    calls = []

    def kernel(stream, grid, threads, *values):
        calls.append((grid, threads, values))

    x = torch.randn(6, 8)
    plan = LaunchPlan(
        (Buffer((3, 2), torch.int32),),
        (Buffer((4,), torch.int32, fill=0),),
        (Launch(kernel, 5, 64, (9, Address(0, 8), Address(1), Address(3))),),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_of", lambda x: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
        (result,) = launch_plan.run(plan, (x, None))
    ((grid, threads, values),) = calls
    assert (grid, threads) == (5, 64)
    assert values[:3] == (9, x.data_ptr() + 8, 0) and values[3] != 0
    assert (result.shape, result.dtype) == ((3, 2), torch.int32)
