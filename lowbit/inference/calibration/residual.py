"""The residual stream of a model, found by running it, and its rotation folded into the weights around it.

Writers (embeddings and linears) add to the stream x, and readers (linears) multiply norm(x). With an orthogonal R

    writers W → Rᵀ W,  b → b R,  E → E R        x → x R        readers W → W R

the model computes the same, if norms have no gains of their own: norm(x R) = norm(x) R. So gains are folded into the
readers first (`foldings`). R has a Hadamard matrix of 4ᵏ in each block of channels, which keeps the mean of a block
where it is. So it passes the mean subtraction of LayerNorm as well, and a LayerNorm stays one.

Which modules write and read is found by trial, for any model. Hooks turn the outputs of some modules, and the inputs of
all linears and norms are compared with those of the model as it was: an input is the same, or turned by R, which makes
its linear a reader, or a mixture of both, which is wrong. The search begins without writers, and asks for turned inputs
of the norms whose gains were folded. Where an input is wrong it takes modules that ran before as writers, the last ones
first, until the first wrong input lies further on. Modules whose names differ in the first number alone, as those of
all blocks do, become writers together. Comparisons take a few random projections of each input.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lowbit.inference.calibration.batches import Batches
from lowbit.inference.calibration.folding import Folding, foldings
from lowbit.tensor.core import LowbitTensor
from lowbit.tensor.frozen.rotated_tensor import rotated_blocks
from lowbit.tracing.batches import call, eval_mode, output_tensor
from lowbit.tracing.trace import state_restored

_BLOCKS = 16, 4096
"""The fewest and the most channels of a block of a folded rotation."""
_TRIALS = 12
"""Linears before a layer that are tried, the last one first."""
_PROJECTIONS = 8
_HALVES = (torch.float16, torch.bfloat16)
_WAY_OUT = "Take Rotate(folded=False), which rotates the input of each linear as it runs"


def fold_rotations(model: nn.Module, wanted: Collection[int], batches: Batches) -> dict[int, str]:
    """Fold rotations into the model, in place: that of the residual stream, and one of the heads of attention, or of
    whatever linears make the input of others without a nonlinear function between. Returns a note for the report by the
    id of each linear whose input is rotated.

    Weights of 16 bits are float32 meanwhile, and rounded once. Products of float32 have full precision, whatever
    `torch.set_float32_matmul_precision` says. After an error the model is as it was. Takes the memory of a copy of the
    model.

    Args:
        wanted: ids of the linears whose inputs are to be rotated.

    Raises ValueError where the stream is not found, with the module that stands in the way, or where the outputs
    change.
    """
    with (
        eval_mode(model),
        state_restored(model),
        torch.no_grad(),
        _copied(model),
        ExitStack() as stack,
    ):
        for device in {p.device.type for p in model.parameters()}:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_full_float32())
        batches = Batches(_in_float32(batch) for batch in batches)
        before = [_projected(model, batch) for batch in batches]
        notes = _fold_stream(model, batches)
        notes |= _fold_pairs(model, batches[0], set(wanted) - notes.keys())
        for number, (batch, own) in enumerate(zip(batches, before, strict=True)):
            if not _are_close(_projected(model, batch), own):
                raise ValueError(
                    f"the rotated model gives other outputs for batch {number}, which may take another path than batch "
                    f"0. {_WAY_OUT}"
                )
    return notes


@contextmanager
def _full_float32() -> Iterator[None]:
    """No TF32 or bfloat16 inside products of float32, which change inputs by more than comparisons allow."""
    own: Any = torch.backends
    kinds: list[Any] = [own.cuda.matmul, own.cudnn.conv, own.mkldnn.matmul, own.mkldnn.conv]
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


# ---- what a model computes, and what it computes where outputs are turned -------------------------------------------


class _Wrong(Exception):
    """An input that is not what it was. `at`: how many inputs were right before."""

    def __init__(self, at: int, name: str) -> None:
        super().__init__(name)
        self.at, self.name = at, name


class _Input(NamedTuple):
    module: nn.Module
    projection: Tensor


class _Trial:
    """A model whose modules' outputs are turned by hooks, and the inputs that its modules had before.

    Args:
        size: the channels of norms that count.
    """

    def __init__(self, model: nn.Module, batch: Any, size: int) -> None:
        self.model, self.batch, self.size = model, batch, size
        self.names = {id(module): name for name, module in model.named_modules()}
        self.seen: list[_Input] = []
        self.outputs: list[tuple[int, nn.Module]] = []
        """Embeddings and linears, each with the number of inputs that were seen before its output."""
        self.writes: list[tuple[int, nn.Module]] = []
        """Modules of any class with parameters of their own that give `size` channels, as `outputs`."""
        self._random: dict[int, Tensor] = {}
        with self._hooks(self._record_input, self._record_output), ExitStack() as stack:
            for module in model.modules():
                if module._parameters:
                    stack.callback(module.register_forward_hook(self._record_write).remove)
            self.output = _projected(model, batch)

    def first_wrong(self, before: Callable[..., Any], after: Callable[..., Any]) -> _Wrong | None:
        """The first wrong input, or the output, where these hooks run before and after each module. `before` gets the
        number of the input, the module and its input, and returns a new input or None."""
        number = itertools.count()

        def compare(module: nn.Module, args: Any, kwargs: Any) -> Any:
            at = next(number)
            if at >= len(self.seen) or self.seen[at].module is not module:
                raise _Wrong(at, self.names[id(module)])
            new = before(at, module, _first(args, kwargs))
            return None if new is None else ((new, *args[1:]), kwargs if args else {})

        try:
            with self._hooks(compare, after):
                found = _projected(self.model, self.batch)
        except _Wrong as wrong:
            return wrong
        is_same = _are_close(found, self.output)
        return None if is_same else _Wrong(len(self.seen), "the output of the model")

    def is_expected(self, at: int, x: Tensor, tolerance: float | None = None) -> bool:
        """True if x is the input `at` of the model as it was."""
        return _are_close(x @ self._directions(x), self.seen[at].projection, tolerance)

    def is_norm(self, module: nn.Module) -> bool:
        weight = module._parameters.get("weight")
        return isinstance(weight, Tensor) and tuple(weight.shape) == (self.size,)

    def _directions(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        if size not in self._random:
            generator = torch.Generator().manual_seed(size)
            found = torch.randn(size, _PROJECTIONS, generator=generator, dtype=torch.float64)
            self._random[size] = found.to(x.device, x.dtype)
        return self._random[size]

    @contextmanager
    def _hooks(self, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.model.modules():
                has_input = isinstance(module, nn.Linear) or self.is_norm(module)
                if has_input:
                    handle = module.register_forward_pre_hook(before, with_kwargs=True)
                    stack.callback(handle.remove)
                if has_input or isinstance(module, nn.Embedding):
                    stack.callback(module.register_forward_hook(after).remove)
            yield

    def _record_input(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = _first(args, kwargs)
        self.seen.append(_Input(module, x @ self._directions(x)))

    def _record_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.is_norm(module):
            self.outputs.append((len(self.seen), module))

    def _record_write(self, module: nn.Module, args: Any, output: Any) -> None:
        found = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(found, Tensor) and found.ndim > 1 and found.shape[-1] == self.size:
            self.writes.append((len(self.seen), module))


def _first(args: Any, kwargs: Any) -> Tensor:
    found: Tensor = args[0] if args else next(iter(kwargs.values()))
    return found


def _projected(model: nn.Module, batch: Any) -> Tensor:
    """A few random projections of the model's output."""
    y = output_tensor(call(model, batch))
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(y.shape[-1], _PROJECTIONS, generator=generator, dtype=torch.float64)
    return y @ directions.to(y.device, y.dtype)


def _are_close(found: Tensor, expected: Tensor, tolerance: float | None = None) -> bool:
    """`tolerance`: None: what rounding may change in a whole model. Those of transformers compute norms in float32."""
    if found.shape != expected.shape:
        return False
    if tolerance is None:
        tolerance = 1e-6 if expected.dtype is torch.float64 else 1e-4
    return float((found - expected).norm()) <= tolerance * float(expected.norm())


@contextmanager
def _copied(model: nn.Module) -> Iterator[None]:
    """Weights and buffers are copies in this context, those of 16 bits in float32. They are rounded and copied back at
    its end, and dropped after an error."""
    held = [(t, t.data) for t in (*model.parameters(), *model.buffers()) if _is_plain(t)]
    for t, data in held:
        t.data = data.float() if t.dtype in _HALVES else data.clone()
    try:
        yield
    except BaseException:
        for t, data in held:
            t.data = data
        raise
    for t, data in held:
        t.data = data.copy_(t.data)


def _is_plain(t: Tensor) -> bool:
    return t.dtype in _HALVES or (t.dtype.is_floating_point and not isinstance(t, LowbitTensor))


def _in_float32(batch: Any) -> Any:
    plain = dict(batch) if hasattr(batch, "keys") else batch
    return tree_map(
        lambda t: t.float() if isinstance(t, Tensor) and t.dtype in _HALVES else t, plain
    )


# ---- the residual stream ---------------------------------------------------------------------------------------------


def _fold_stream(model: nn.Module, batches: Batches) -> dict[int, str]:
    found = [f for f in foldings(model, None, batches) if f.before.weight.ndim == 1]
    if not found:
        raise ValueError(
            f"no norm's gain folds into linears, so no residual stream is found. {_others(model)}{_WAY_OUT}"
        )
    ((size, _),) = Counter(f.linears[0].in_features for f in found).most_common(1)
    norms = [f for f in found if f.linears[0].in_features == size]
    block = min(4 ** (((size & -size).bit_length() - 1) // 2), _BLOCKS[1])
    if block < _BLOCKS[0]:
        raise ValueError(
            f"a residual stream of {size} channels has no blocks of {_BLOCKS[0]} to rotate. {_WAY_OUT}"
        )
    for folding in norms:
        _fold_gain(folding)
    stream = _Stream(_Trial(model, batches[0], size), block, {id(f.before) for f in norms})
    stream.search()
    stream.rotate()
    return dict.fromkeys(stream.readers, f"in the residual stream by {block}")


@torch.no_grad()
def _fold_gain(folding: Folding) -> None:
    """Give the norm a gain of 1, and the linears its gain."""
    norm: Any = folding.before
    offset = 1.0 if folding.offset else 0.0
    gain = norm.weight.double() + offset
    bias = norm._parameters.get("bias")
    if bias is not None and not gain.all():
        raise ValueError(
            f"{folding.name} has gains of 0 beside a bias, which fold into no linear. {_WAY_OUT}"
        )
    for linear in folding.linears:
        linear.weight.copy_(linear.weight * gain)
    norm.weight.fill_(1 - offset)
    if bias is not None:
        bias.copy_(bias / gain)


class _Stream:
    """The search for the modules that write to the stream and read it.

    Args:
        norms: ids of those that must read it.
    """

    def __init__(self, trial: _Trial, block: int, norms: set[int]) -> None:
        self.trial, self.block, self.norms = trial, block, norms
        self.writers: set[int] = set()
        self.readers: dict[int, nn.Module] = {}
        self.turned_norms: dict[int, nn.Module] = {}
        self.units: dict[str, list[tuple[int, nn.Module]]] = {}
        """Modules that may write, by the name that they share, each with the place of its output."""
        for at, module in trial.outputs:
            width = getattr(module, "embedding_dim", getattr(module, "out_features", None))
            if width == trial.size:
                shared = re.sub(r"\d+", "*", trial.names[id(module)], count=1)
                self.units.setdefault(shared, []).append((at, module))
        self._check_reached()

    def _check_reached(self) -> None:
        """Raise ValueError for a module that may write or read, and that the batch does not reach."""
        trial = self.trial
        reached = {id(m) for _, m in trial.outputs}
        for name, module in trial.model.named_modules():
            sizes = {
                getattr(module, key, 0) for key in ("in_features", "out_features", "embedding_dim")
            }
            is_layer = isinstance(module, nn.Linear | nn.Embedding)
            if is_layer and trial.size in sizes and id(module) not in reached:
                raise ValueError(
                    f"the first batch does not run {name}, which may belong to the residual stream: put a batch first "
                    f"that runs all layers. Or t{_WAY_OUT[1:]}"
                )

    def search(self) -> None:
        """Find the writers. Raises ValueError where none fit."""
        wrong = self._first_wrong(self.writers)
        while wrong is not None:
            latest: list[tuple[int, set[int]]] = []
            for modules in self.units.values():
                places = [at for at, _ in modules if at <= wrong.at]
                ids = {id(module) for _, module in modules}
                if places and not ids <= self.writers:
                    latest.append((places[-1], ids))
            units = [ids for _, ids in sorted(latest, key=lambda unit: -unit[0])]
            pairs = (a | b for a, b in itertools.combinations(units, 2))
            for more in itertools.chain(units, pairs, [set().union(*units)]):
                found = self._first_wrong(self.writers | more)
                if found is None or found.at > wrong.at:
                    self.writers, wrong = self.writers | more, found
                    break
            else:
                raise ValueError(self._why(wrong))

    def _first_wrong(self, writers: set[int]) -> _Wrong | None:
        self.readers, self.turned_norms = {}, {}
        trial, block = self.trial, self.block

        def before(at: int, module: nn.Module, x: Tensor) -> Tensor | None:
            is_stream = id(module) in self.norms
            if not is_stream and trial.is_expected(at, x):
                return None
            back = rotated_blocks(x, block) if x.shape[-1] == trial.size else x
            if not trial.is_expected(at, back):
                raise _Wrong(at, trial.names[id(module)])
            if trial.is_norm(module):
                self.turned_norms[id(module)] = module
                return None
            self.readers[id(module)] = module
            return back

        def after(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            if id(module) in writers:
                return rotated_blocks(output, block)
            bias = module._parameters.get("bias")
            if id(module) in self.turned_norms and bias is not None:
                return output + (rotated_blocks(bias, block) - bias)
            return None

        return trial.first_wrong(before, after)

    def _why(self, wrong: _Wrong) -> str:
        name = wrong.name
        text = f"the input of {name}" if name in self.trial.names.values() else name
        text = f"no rotation of the modules before it keeps {text} as it was"
        if wrote := [module for at, module in self.trial.writes if at <= wrong.at]:
            kind = type(wrote[-1]).__name__
            text += f". The last to write before it is {self.trial.names[id(wrote[-1])]}, of {kind}"
        text += f". {_others(self.trial.model)}"
        if name in self.trial.names.values():
            weight = self.trial.model.get_submodule(name)._parameters.get("weight")
            others = [
                other
                for other, module in self.trial.model.named_modules()
                if other != name and module._parameters.get("weight") is weight
            ]
            if others:
                text += (
                    f"Its weight is that of {others[0]}, so no gain folds into it: untie them, as in "
                    f"model.{name}.weight = nn.Parameter(model.{name}.weight.detach().clone()). Or t"
                )
                return text + _WAY_OUT[1:]
        return text + _WAY_OUT

    @torch.no_grad()
    def rotate(self) -> None:
        """Rotate the weights of writers and readers, and the biases of norms, each parameter once."""
        changes: dict[int, tuple[Tensor, set[int]]] = {}

        def change(module: nn.Module, name: str, dim: int) -> None:
            parameter = module._parameters.get(name)
            if parameter is not None:
                changes.setdefault(id(parameter), (parameter, set()))[1].add(dim)

        writers = {
            id(module): module for _, module in self.trial.outputs if id(module) in self.writers
        }
        for module in writers.values():
            change(module, "weight", -1 if isinstance(module, nn.Embedding) else 0)
            change(module, "bias", -1)
        for module in self.readers.values():
            change(module, "weight", -1)
        for module in self.turned_norms.values():
            change(module, "bias", -1)
        for parameter, _ in changes.values():
            if isinstance(parameter, LowbitTensor):
                raise ValueError(
                    f"a weight of the residual stream is quantized already: {parameter!r}. {_WAY_OUT}"
                )
        for parameter, dims in changes.values():
            parameter.copy_(rotated_blocks(parameter, self.block, sorted(dims)))


def _others(model: nn.Module) -> str:
    """A sentence on the modules with matrices into which no rotation folds, by the names that they share; "": none."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        has_matrix = any(p is not None and p.ndim > 1 for p in module._parameters.values())
        if has_matrix and not isinstance(module, nn.Linear | nn.Embedding):
            found[re.sub(r"\d+", "*", name)] = type(module).__name__
    if not found:
        return ""
    named = ", ".join(f"{name} ({kind})" for name, kind in found.items())
    return f"Rotations fold into nn.Linear and nn.Embedding, and not into {named}. "


# ---- linears that make the input of others ---------------------------------------------------------------------------


def _fold_pairs(model: nn.Module, batch: Any, wanted: set[int]) -> dict[int, str]:
    """Rotate the outputs of a linear, as of the values of attention, and the columns of those that multiply them. The
    model changes after the last trial, so that inputs before a trial's first module are those of the record, to the
    bit."""
    trial = _Trial(model, batch, 0)
    groups: list[tuple[int, list[nn.Linear]]] = []
    for at, (module, projection) in enumerate(trial.seen):
        assert isinstance(module, nn.Linear)
        if groups and torch.equal(trial.seen[groups[-1][0]].projection, projection):
            groups[-1][1].append(module)
        else:
            groups.append((at, [module]))
    found: list[tuple[nn.Linear, list[nn.Linear], int]] = []
    failed: set[str] = set()
    for at, linears in groups:
        shared = re.sub(r"\d+", "*", trial.names[id(linears[0])], count=1)
        if shared in failed or not any(id(m) in wanted for m in linears):
            continue
        before = [m for place, m in trial.outputs if place <= at and isinstance(m, nn.Linear)]
        for first in before[: -_TRIALS - 1 : -1]:
            if size := _block_of_pair(trial, first, linears):
                found.append((first, linears, size))
                break
        else:
            failed.add(shared)
    for first, linears, size in found:
        columns = [(linear.weight, -1) for linear in linears]
        for parameter, dim in ((first.weight, 0), (first.bias, -1), *columns):
            if parameter is not None:
                parameter.copy_(rotated_blocks(parameter, size, (dim,)))
    return {
        id(m): f"in {trial.names[id(first)]} by {size}"
        for first, linears, size in found
        for m in linears
    }


def _block_of_pair(trial: _Trial, first: nn.Linear, linears: Sequence[nn.Linear]) -> int:
    """The largest block, up to the heads' size, by which the outputs of `first` can be rotated; 0: none."""
    ids = {id(linear) for linear in linears}
    if any(isinstance(m.weight, LowbitTensor) for m in (first, *linears)):
        return 0

    def before(at: int, module: nn.Module, x: Tensor) -> Tensor | None:
        is_own = id(module) in ids
        back = rotated_blocks(x, size) if is_own else x
        # Heads that attend nearly alike differ by little, and rounding by less.
        if not trial.is_expected(at, back, 16 * torch.finfo(x.dtype).eps if is_own else None):
            raise _Wrong(at, trial.names[id(module)])
        return back if is_own else None

    def after(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return rotated_blocks(output, size) if module is first else None

    best, size = 0, _BLOCKS[0]
    while size <= _BLOCKS[1] and first.out_features % size == linears[0].in_features % size == 0:
        if trial.first_wrong(before, after) is not None:
            break
        best, size = size, size * 2
    return best
