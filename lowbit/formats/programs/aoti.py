"""A package of AOTInductor, "aoti": the model compiled for this machine, which C++ and Python load without lowbit.

The package holds a shared library and the packed weights. `lowbit.formats.decompositions` writes lowbit's ops as ops of
PyTorch, so the library needs libtorch alone:

    model = torch._inductor.aoti_load_package("model.pt2")                        # Python, without lowbit
    torch::inductor::AOTIModelPackageLoader model("model.pt2");                   // C++, without Python

After writing, the package is loaded once, and its outputs are compared with those of the model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from lowbit.formats.base import FormatError
from lowbit.formats.programs.base import Call, ProgramFormat
from lowbit.formats.programs.capture import first_line, quiet, traced
from lowbit.formats.programs.decompositions import decompositions
from lowbit.formats.programs.running import called, compare, outputs_of_model, tolerance_of
from lowbit.formats.sources import Item

_OF_TORCH = {"aten", "prims", "prim"}


class Aoti(ProgramFormat):
    name = "aoti"
    suffix = ".pt2"

    def write(self, call: Call, path: Path, lossy: bool) -> list[Item]:
        with quiet():
            program = traced(call).run_decompositions(decompositions())
        if foreign := foreign_ops(program):
            raise FormatError(
                f"the package would need {', '.join(foreign)} in the process that loads it. For a package that such a "
                "process loads, call torch.export.export and torch._inductor.aoti_compile_and_package"
            )
        try:
            with torch.no_grad(), quiet():
                torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        except OSError:
            raise
        except Exception as error:  # Inductor raises errors of many kinds
            raise FormatError(f"AOTInductor cannot compile: {first_line(error)}") from error

        def run() -> list[Tensor]:
            return called(torch._inductor.aoti_load_package(str(path)), call)

        compare(self.name, run, lambda: outputs_of_model(call), tolerance_of(program, call))
        return [Item(name, weight, "other") for name, weight in call.weights.items()]


def foreign_ops(program: ExportedProgram) -> list[str]:
    """The ops of a program that PyTorch does not define, by name."""
    found = {
        str(node.target)
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in _OF_TORCH
    }
    return sorted(found)
