"""An ONNX file, "onnx": weight-only models with their weights packed, for onnxruntime.

    use of the weight          4 bits                                  8 bits
    linear                     MatMulNBits (com.microsoft)             MatMulNBits (com.microsoft)
    embedding                  GatherBlockQuantized (com.microsoft)    GatherBlockQuantized (com.microsoft)
    any other, a convolution   refused                                 DequantizeLinear

The two ops of com.microsoft take codes as lowbit packs them: code + 2^(b−1), two codes of 4 bits in a byte, the even
one in the low half. A head that is tied to an embedding shares its codes in the file. onnxruntime has these ops on CPUs
and GPUs; they are not part of standard ONNX.

A weight with a scale for each row is stored in blocks of equal scales, because MatMulNBits has blocks only. The size of
the blocks is the power of two from 16 to 256 that takes the fewest bytes.

onnxruntime multiplies in the dtype of the inputs, float32 or float16, and sums in float32.

After writing, the codes in the file are compared with those of the weights. If onnxruntime is installed, it runs the
file once, and the outputs are compared with the model's: the traced graph has ops that only onnxruntime computes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from lowbit import optional
from lowbit.files import digests
from lowbit.formats.base import FormatError
from lowbit.formats.integers import IntegerLayout, exact_scales, integers_of, layout_of, unsigned
from lowbit.formats.programs.base import Call, ProgramFormat, package
from lowbit.formats.programs.capture import Use, first_line, quiet, traced_with
from lowbit.formats.programs.running import called, compare, outputs_of_model, tolerance_of
from lowbit.formats.sources import Item
from lowbit.numerics.packing import pack
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.conv_tensor import ConvTensor

OPSET = 21
"""The first opset whose DequantizeLinear takes blocks."""
BLOCKS = (16, 32, 64, 128, 256)
"""Sizes of blocks that MatMulNBits takes."""
_ACCEPTED = (
    "int4 and int8 weights, symmetric or asymmetric, in rows or groups of 16, 32, 64, 128 or 256"
)
_MOST_IN_ONE_FILE = 2**30
"""Bytes of tensors, since protobuf holds less than 2 GiB. More go to a file of their own beside the program."""


class Onnx(ProgramFormat):
    name = "onnx"
    suffix = ".onnx"

    def write(self, call: Call, path: Path, lossy: bool) -> list[Item]:
        for needed in ("onnx", "onnxscript"):
            package(needed, "onnx")
        ops: dict[str, list[str]] = {}

        def replace(name: str, weight: LowbitTensor, use: Use) -> nn.Module:
            module, op = _module_of(weight, use)
            ops.setdefault(name, []).append(op)
            return module

        program = traced_with(call, replace)
        try:
            with torch.no_grad(), quiet():
                made = torch.onnx.export(
                    program,
                    dynamo=True,
                    opset_version=OPSET,
                    verbose=False,
                    dynamic_shapes=call.dynamic_shapes,
                )
        except Exception as error:  # the exporter raises errors of many kinds
            raise FormatError(
                f"torch.onnx cannot translate the program: {_reason(error)}"
            ) from error
        assert made is not None
        with quiet():
            _share(made.model)
        size = sum(t.nbytes for t in program.state_dict.values())
        made.save(str(path), external_data=size > _MOST_IN_ONE_FILE)
        _check(path, {n: t for n, t in program.state_dict.items() if n.startswith("lowbit_")})
        if optional.is_importable("onnxruntime"):

            def reference() -> list[Tensor]:
                return outputs_of_model(call)

            compare(self.name, lambda: _run(path, call), reference, tolerance_of(program, call))
        return [
            Item(name, weight, "other", f"{weight.stored_format()} in {' and '.join(ops[name])}")
            for name, weight in call.weights.items()
            if name in ops
        ]


def _share(model: Any) -> None:
    """Store equal tensors once."""
    ir, passes = package("onnx_ir", "onnx"), package("onnx_ir.passes.common", "onnx")
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            array = tensor.numpy()
            # The pass hashes contiguous memory only, and the exporter folds the transposition of a plain weight into a
            # view.
            if not array.flags.c_contiguous:
                value.const_value = ir.Tensor(array.copy("C"), tensor.dtype, name=tensor.name)
    passes.DeduplicateHashedInitializersPass(size_limit=2**62)(model)


def _check(path: Path, packed: dict[str, Tensor]) -> None:
    """Raise FormatError unless the file has the bytes of the codes. The exporter may give them other names."""
    onnx = package("onnx", "onnx")
    stored = {
        digests.of_pieces([onnx.numpy_helper.to_array(t).tobytes()])
        for t in onnx.load(str(path)).graph.initializer
    }
    for name, t in packed.items():
        is_there = digests.of_tensor(t) in stored
        if name.endswith(".codes") and not is_there:
            raise FormatError(f"the codes of {name} are not in the file; please report it")


def _run(path: Path, call: Call) -> list[Tensor]:
    """The outputs of the file for the example call, on the CPU."""
    onnxruntime = package("onnxruntime", "onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]

    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        # Other values of the call, such as numbers and None, are constants of the file.
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        given = {name: t.numpy() for name, t in zip(names, tensors, strict=True)}
        return [torch.from_numpy(y) for y in session.run(None, given)]

    return called(run, call)


def _reason(error: BaseException) -> str:
    """The first line of the error at the end of the chain, and the node of the graph."""
    node = ""
    while error.__cause__ is not None:
        error = error.__cause__
        found = re.search(r"translating node (.*?)\. See", str(error))
        node = f" ({found[1]})" if found else node
    return first_line(error) + node


# ---- the modules ---------------------------------------------------------------------------------------------------


def _module_of(weight: LowbitTensor, use: Use) -> tuple[nn.Module, str]:
    """The module that takes the place of a use of the weight, and the name of its op."""
    matrix, layout = _integers(weight)
    if use == "linear":
        return _MatMulNBits(matrix, layout), "MatMulNBits"
    if use == "embedding":
        return _GatherBlockQuantized(matrix, layout), "GatherBlockQuantized"
    if layout.bits == 4:
        raise FormatError(
            "onnxruntime unpacks int4 in linears and embeddings only, int8 also elsewhere"
        )
    return _Values(matrix, layout, tuple(weight.shape)), "DequantizeLinear"


def _integers(weight: LowbitTensor) -> tuple[AffineTensor, IntegerLayout]:
    """The matrix [N, K] of the weight. Raises FormatError for a weight that onnxruntime has no op for."""
    matrix = weight.matrix if isinstance(weight, ConvTensor) else weight
    spec = getattr(matrix, "spec", None)
    if type(matrix) is not AffineTensor or spec is None:
        raise FormatError(f"onnx holds {_ACCEPTED}, got {weight.stored_format()}")
    if spec.zero_point_is_value or spec.format.bits not in (4, 8):
        raise FormatError(f"onnx holds {_ACCEPTED}, got {weight.stored_format()}")
    if matrix.activation is not None:
        raise FormatError(
            f"onnx holds {_ACCEPTED} with inputs in high precision; got {weight.stored_format()}"
        )
    if matrix.dtype not in (torch.float32, torch.float16):
        raise FormatError(
            f"onnxruntime multiplies in float32 or float16, got {matrix.dtype}: call model.float(), which keeps codes"
        )
    layout = layout_of(matrix, "onnx")
    if layout.group_size is not None and layout.group_size not in BLOCKS:
        raise FormatError(f"onnx holds {_ACCEPTED}, got groups of {layout.group_size}")
    return matrix, layout


def block_size(columns: int, bits: int) -> int:
    """The blocks of a row with one scale that take the fewest bytes, padding and float32 scales included."""
    return min(BLOCKS, key=lambda size: -(-columns // size) * (size * bits // 8 + 4))


class _Packed(nn.Module):
    """codes uint8 [N, blocks, bytes] of code + 2^(b−1), scales [N, blocks], zero points int8 [N, blocks] or None."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None

    def __init__(self, weight: AffineTensor, layout: IntegerLayout, size: int) -> None:
        super().__init__()
        codes, scale, zero_point = integers_of(weight, layout)
        self._bits, self._size, (rows, self._columns) = layout.bits, size, codes.shape
        blocks = -(-self._columns // size)
        padded = F.pad(unsigned(codes, layout.bits), (0, blocks * size - self._columns))
        self.register_buffer("codes", pack(padded, layout.bits).view(rows, blocks, -1))
        scale = exact_scales(scale, weight.dtype, "an onnx weight of this dtype")
        self.register_buffer("scale", scale.expand(rows, blocks).contiguous())
        if zero_point is not None:
            zero_point = unsigned(zero_point.expand(rows, blocks), layout.bits).contiguous()
        self.register_buffer("zero_point", zero_point)


class _MatMulNBits(_Packed):
    """x [..., K] times a weight [N, K]."""

    def __init__(self, weight: AffineTensor, layout: IntegerLayout) -> None:
        size = layout.group_size or block_size(weight.shape[1], layout.bits)
        super().__init__(weight, layout, size)
        if self.zero_point is not None and layout.bits == 4:
            self.zero_point = pack(F.pad(self.zero_point, (0, self.zero_point.shape[1] % 2)), 4)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype != self.scale.dtype:
            # torch.onnx checks no dtypes of a symbolic op, and onnxruntime would refuse the file.
            raise FormatError(
                f"a {x.dtype} input meets a weight of {self.scale.dtype}: give example_inputs of that dtype, or call "
                "model.to(dtype), which keeps codes"
            )
        rows = self.codes.shape[0]
        attrs: dict[str, Any] = {
            "K": self._columns,
            "N": rows,
            "bits": self._bits,
            "block_size": self._size,
        }
        y: Tensor = torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            [t for t in (x, self.codes, self.scale, self.zero_point) if t is not None],
            attrs,
            dtype=x.dtype,
            shape=(*x.shape[:-1], rows),
            version=1,
        )
        return y if bias is None else y + bias


class _GatherBlockQuantized(_Packed):
    """Rows of an embedding [N, K]. The codes are those of `_MatMulNBits`, so that a tied head shares them."""

    def __init__(self, weight: AffineTensor, layout: IntegerLayout) -> None:
        columns = weight.shape[1]
        if columns % BLOCKS[0]:
            raise FormatError(f"onnx holds embeddings of a multiple of 16 columns, got {columns}")
        size = layout.group_size or block_size(columns, layout.bits)
        fitting = [b for b in BLOCKS if columns % b == 0]
        super().__init__(weight, layout, size if size in fitting else fitting[-1])

    def forward(self, indices: Tensor) -> Tensor:
        _, blocks, _ = self.codes.shape
        inputs = [self.codes, indices, self.scale.unsqueeze(-1)]
        if self.zero_point is not None:
            inputs.append(self.zero_point.unsqueeze(-1))
        attrs: dict[str, Any] = {
            "bits": self._bits,
            "block_size": self._size,
            "gather_axis": 0,
            "quantize_axis": 2,
        }
        found: Tensor = torch.onnx.ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            inputs,
            attrs,
            dtype=self.scale.dtype,
            shape=(*indices.shape, blocks, self._size),
            version=1,
        )
        return found.flatten(-2)


class _Values(nn.Module):
    """The values of an 8-bit weight of any shape: codes int8 [N, K], scales and zero points [N] or [N, groups]."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None

    def __init__(self, weight: AffineTensor, layout: IntegerLayout, shape: tuple[int, ...]) -> None:
        super().__init__()
        codes, scale, zero_point = integers_of(weight, layout)
        self._attrs: dict[str, Any] = {"axis": 0}
        if layout.group_size is not None:
            self._attrs = {"axis": 1, "block_size": layout.group_size}
        else:
            scale = scale[:, 0]
            zero_point = None if zero_point is None else zero_point[:, 0]
        scale = exact_scales(scale, weight.dtype, "an onnx weight of this dtype")
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale.contiguous())
        self.register_buffer("zero_point", None if zero_point is None else zero_point.contiguous())
        self._shape = shape

    def forward(self) -> Tensor:
        inputs = [self.codes, self.scale]
        inputs += [] if self.zero_point is None else [self.zero_point]
        values: Tensor = torch.onnx.ops.symbolic(
            "DequantizeLinear",
            inputs,
            self._attrs,
            dtype=self.scale.dtype,
            shape=self.codes.shape,
            version=OPSET,
        )
        return values.reshape(self._shape)
