"""Ops of torch whose CUDA kernel is a compiled launcher (``launcher.cpp``), which takes microseconds a call.

An op that has plans (`launch_plan.LaunchPlan`) is registered twice: under its own name, and once more under its
`python_name`, which always runs in Python. `take_over` makes the launcher the CUDA kernel of the first. The launcher
knows no plan at first. It calls the op in Python, whose `learn` gives it the plan for the next call with operands of
the same layouts. Calls without a plan run in Python: tensors on another device than the current one, operands that must
be copied, empty results.

The launcher needs a C++ compiler. Without one, all calls run in Python, which warns once.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.runtime import host_compiler, launches, library, nvrtc
from lowbit_kernels.runtime.launch_plan import (
    Address,
    Buffer,
    CublasProduct,
    Launch,
    LaunchPlan,
    Map,
    TensorPart,
    run,
)
from lowbit_kernels.runtime.sources import program
from lowbit_kernels.runtime.warned import warn_once

# In the order of `Functions` in launcher.cpp.
TORCH_FUNCTIONS = (
    *("aoti_torch_get_data_ptr", "aoti_torch_get_dim", "aoti_torch_get_sizes"),
    *("aoti_torch_get_strides", "aoti_torch_get_dtype", "aoti_torch_get_device_index"),
    "aoti_torch_dtype_element_size",
    *("aoti_torch_empty_strided", "aoti_torch_delete_tensor_object"),
    *("torch_string_c_str", "torch_string_length", "torch_delete_string"),
    *("torch_list_size", "torch_list_get_item", "torch_delete_list", "torch_call_dispatcher"),
    *("aoti_torch__reinterpret_tensor", "aoti_torch_get_current_device_index"),
)
TORCH_CUDA_FUNCTIONS = ("aoti_torch_cuda__scaled_mm_out", "aoti_torch_get_current_cuda_stream")
DRIVER_FUNCTIONS = (
    *("cuCtxGetDevice", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"),
    *("cuDevicePrimaryCtxRelease_v2", "cuMemsetD8Async", "cuMemsetD32Async", "cuLaunchKernelEx"),
    "cuTensorMapEncodeTiled",
)
BUILT_FOR = ctypes.c_uint64(2 << 56 | 11 << 48)
"""torch 2.11, whose form of arguments ``launcher.cpp`` reads and writes. Later versions of torch still accept it."""
LETTERS = {
    **{"Tensor": "t", "Tensor?": "o", "str": "s", "bool": "b", "ScalarType": "d"},
    **{"SymInt": "n", "float": "n", "float[]": "l"},
}
"""The letters by which ``launcher.cpp`` knows the types of arguments."""
MOST_ARGUMENTS, MOST_MAPS = 32, 4
"""The sizes of the arrays in which the function `launch` of ``launcher.cpp`` passes the arguments of a kernel."""

_is_compiling = torch.compiler.is_dynamo_compiling
_lock = threading.Lock()
_launcher: ctypes.CDLL | None = None
_numbers: dict[str, int | None] = {}
"""The launcher's number of each op that it has taken over, or None where it cannot."""


def python_name(name: str) -> str:
    """The name of the op that computes the op `name` in Python."""
    return f"{name}_in_python"


def planned_op(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], flops: Callable[..., int]
) -> Any:
    """`library.register` of an op that has plans, also under its `python_name`. Call the result by `called`."""
    op = library.register(schema, run, fake, flops)
    name, _, arguments = schema.partition("(")
    library.LIBRARY.define(f"{python_name(name)}({arguments}")
    library.LIBRARY.impl(python_name(name), _keeping_error(run), "CompositeExplicitAutograd")
    return op


class _Raised(threading.local):
    """The exception of the planned op that this thread has `called`, if that ran in Python."""

    wanted: bool = False
    error: BaseException | None = None


_raised = _Raised()


def _keeping_error(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, whose exception stays known. The launcher throws a RuntimeError with its message instead."""

    def kept(*arguments: Any) -> Any:
        try:
            return run(*arguments)
        except BaseException as error:
            if _raised.wanted:
                _raised.error = error
            tell(error)
            raise

    return kept


def called(op: Any, *arguments: Any) -> Any:
    """The result of an op that `planned_op` registered, or the exception of its `run`.

    A compiled graph calls the op itself. There the exception is a RuntimeError with the same message.
    """
    if _is_compiling():
        return op(*arguments)
    outer, _raised.wanted, _raised.error = _raised.wanted, True, None  # an op may call others
    try:
        return op(*arguments)
    except RuntimeError:
        # An exception holds the tensors of its frames, so it is not kept.
        error, _raised.error = _raised.error, None
        if error is None:
            raise
        raise error from None
    finally:
        _raised.wanted = outer


def take_over(name: str) -> None:
    """Make the launcher the CUDA kernel of ``lowbit::<name>``, unless it is already. Warns once if it cannot."""
    global _launcher
    if name in _numbers:
        return
    with _lock:  # one library for all ops, however many threads come first
        if name in _numbers:
            return
        number = None
        try:
            _launcher = _launcher or _for_cuda()
            schema = str(getattr(torch.ops.lowbit, name).default._schema)
            number = register(_launcher, len(_numbers), name, letters(schema), b"CUDA")
        except (RuntimeError, OSError, AttributeError, KeyError) as error:
            warn_once(
                "launcher",
                f"lowbit's launcher cannot be used, so a call takes 15 to 100 us more of the host's time: {error!r}. "
                "Install g++ or clang++, or name a compiler in $CXX",
            )
        _numbers[name] = number


def letters(schema: str) -> str:
    """A letter for each argument of an op with this schema. Its results are tensors."""
    arguments = schema[schema.index("(") + 1 : schema.index(") ->")]
    return "".join(LETTERS[argument.split()[0]] for argument in arguments.split(", "))


def learn(name: str, plan: LaunchPlan | None) -> None:
    """Tell the launcher, if it has called the op `name` on this thread, the plan of that call; None: Python runs it. A
    plan brings the launcher in."""
    if plan is not None:
        take_over(name)
    number = _numbers.get(name)
    if number is not None and _launcher is not None:
        words = encoded(plan)
        _launcher.learn(number, (ctypes.c_int64 * len(words))(*words))


def carried_out(
    name: str, plan: LaunchPlan, operands: Sequence[Tensor | None], is_learnt: bool = True
) -> list[Tensor]:
    """The results of a plan for the op `name`. The launcher learns it if no operand is a copy of one of the call."""
    if is_learnt:
        learn(name, plan)
    return run(plan, operands)


def tell(error: BaseException) -> None:
    """Tell the launcher the exception of the op that this thread runs in Python, for the message that it throws."""
    if _launcher is not None:
        message = "".join(traceback.format_exception_only(error)).strip()
        _launcher.tell(message.encode("utf-8", "replace"))


def _for_cuda() -> ctypes.CDLL:
    """The launcher, set up for CUDA. Raises RuntimeError, OSError or AttributeError where that cannot be."""
    addresses = [
        *addresses_of(torch_library("cpu"), TORCH_FUNCTIONS),
        *addresses_of(torch_library("cuda"), TORCH_CUDA_FUNCTIONS),
        *addresses_of(ctypes.CDLL("libcuda.so.1"), DRIVER_FUNCTIONS),
    ]
    return loaded(addresses, "cuda")


def addresses_of(shared: ctypes.CDLL, names: tuple[str, ...]) -> list[int]:
    """The addresses of C functions. Raises AttributeError where the library lacks one."""
    return [ctypes.cast(getattr(shared, name), ctypes.c_void_p).value or 0 for name in names]


def loaded(addresses: list[int], device: str) -> ctypes.CDLL:
    """The compiled launcher with the functions at these addresses, for tensors on devices of this type.

    Raises:
        RuntimeError: the machine has no C++ compiler, or it cannot compile the launcher.
    """
    made = host_compiler.library(program({}, "runtime/launcher.cpp"))
    made.kernel_of.restype = ctypes.c_void_p
    made.kernel_of.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p]
    made.learn.argtypes = [ctypes.c_int, ctypes.c_void_p]
    made.plans_of.restype = ctypes.c_int64
    made.tell.argtypes = [ctypes.c_char_p]
    made.set_up(
        (ctypes.c_void_p * len(addresses))(*addresses),
        BUILT_FOR,
        getattr(torch_library("cpu"), f"aoti_torch_device_type_{device}")(),
        ctypes.byref(launches.listening_now),
    )
    return made


def register(
    made: ctypes.CDLL, number: int, name: str, arguments: str, key: bytes, space: str = "lowbit"
) -> int:
    """Make the launcher the kernel of an op. Returns `number`.

    Args:
        made: the launcher.
        number: its number of the op.
        name, space: of the op, ``<space>::<name>``.
        arguments: their kinds, a letter each, as launcher.cpp reads them.
        key: the dispatch key.

    Raises:
        RuntimeError: the launcher has no room, or torch refuses the kernel.
    """
    python = f"{space}::{python_name(name)}".encode()
    kernel = made.kernel_of(number, python, arguments.encode())
    if not kernel:
        raise RuntimeError(f"launcher.cpp has no room for {name}: raise MOST_OPS")
    entry, shim = ctypes.c_void_p(), torch_library("cpu")
    error = shim.aoti_torch_library_init_impl(
        space.encode(), key, b"lowbit", 0, ctypes.byref(entry)
    )
    error = error or shim.torch_library_impl(
        entry, name.encode(), ctypes.c_void_p(kernel), BUILT_FOR
    )
    if error:
        raise RuntimeError(f"torch refused a kernel for {space}::{name}")
    return number


@functools.cache
def torch_library(part: str) -> ctypes.CDLL:
    """torch's own library of this name, whose C functions the launcher calls."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_{part}.so"))


# ---- plans as numbers, which `Reader` in launcher.cpp reads ---------------------------------------------------------


def encoded(plan: LaunchPlan | None) -> list[int]:
    """The plan as 64-bit integers. Raises ValueError for a launch that the launcher cannot do."""
    if plan is None:
        return [1]
    words = [0, int(torch.is_inference_mode_enabled())]
    for buffers in (plan.results, plan.scratch):
        words.append(len(buffers))
        for buffer in buffers:
            words += _buffer(buffer)
    words.append(len(plan.launches))
    for launch in plan.launches:
        words += _launch(launch)
    return words


def _buffer(buffer: Buffer) -> list[int]:
    strides = library.contiguous_strides(buffer.shape)
    word = nvrtc.float_word(buffer.fill or 0)
    return [
        _dtype(buffer.dtype),
        len(buffer.shape),
        *buffer.shape,
        *strides,
        buffer.filled_bytes,
        word,
    ]


def _launch(launch: Launch | CublasProduct) -> list[int]:
    if isinstance(launch, CublasProduct):
        return [1, *(word for one in launch for word in _part(one))]
    kernel = launch.kernel
    maps = sum(isinstance(argument, Map) for argument in launch.arguments)
    if len(launch.arguments) > MOST_ARGUMENTS or maps > MOST_MAPS:
        raise ValueError(
            f"a launch with {len(launch.arguments)} arguments and {maps} tensor maps; the launcher takes at most "
            f"{MOST_ARGUMENTS} and {MOST_MAPS}"
        )
    words = [0, kernel.handle, launch.grid, launch.threads, kernel.shared, int(kernel.overlaps)]
    words += (kernel.cluster, len(launch.arguments))
    for argument in launch.arguments:
        if isinstance(argument, Address):
            words += (1, argument.tensor, argument.offset)
        elif isinstance(argument, Map):
            words += (2, *argument)
        else:
            words += (0, argument)
    return words


def _part(part: TensorPart | None) -> list[int]:
    """-1 dimensions stand for None."""
    if part is None:
        return [-1]
    return [len(part.shape), *part.shape, part.tensor, part.offset]


@functools.cache
def _dtype(dtype: torch.dtype) -> int:
    """torch's number of a dtype."""
    name = str(dtype).removeprefix("torch.")
    return getattr(torch_library("cpu"), f"aoti_torch_dtype_{name}")()
