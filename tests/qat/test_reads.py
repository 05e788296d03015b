"""Operations of a forward pass read a prepared weight rounded, whatever they are; all that trains it reads the master.

Each test prepares, runs, converts, and asks for equal outputs to the bit.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit import qat, train
from lowbit.layers.frozen import shown_class
from lowbit.layers.prepared import Prepared
from lowbit.tensor.core.reading import KEEPS, in_forward
from tests.schemes import FREE_SCALES, SCHEMES, WEIGHT_ONLY, axes_of, over

N, K = 24, 64
PRESENT = {f"{name}-present": (scheme, "present") for name, scheme in SCHEMES.items()}
FREE = FREE_SCALES.keys() | {
    n for n, s in SCHEMES.items() if s.activation and s.weight.scale_format == "float"
}
LEARNED = {f"{n}-learned": (s, "learned") for n, s in SCHEMES.items() if n in FREE}
BITNET = {"bitnet": (lb.BitNet(), "")}
every_kind = pytest.mark.parametrize(
    "how",
    [*PRESENT.values(), *LEARNED.values(), *BITNET.values()],
    ids=[*PRESENT, *LEARNED, "bitnet"],
)
ROWS = torch.tensor([3, 1, 1, 7])


def of_scheme(scheme: object) -> tuple[object, ...]:
    """What changes the operations of a prepared weight, not their numbers alone."""
    return axes_of(scheme) if isinstance(scheme, lb.Scheme) else (type(scheme),)


def cosine(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
    return F.linear(F.normalize(x, dim=-1), F.normalize(w, dim=-1))


def filled(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
    table = torch.zeros(N, K)
    table[:] = w
    return F.linear(x, table.add_(w))


FORMS = {
    "cosine": cosine,
    "times": lambda x, w, other: F.linear(x, w * 2),
    "plus": lambda x, w, other: F.linear(x, w + 0.1),
    "centred": lambda x, w, other: F.linear(x, w - w.mean()),
    "low rank": lambda x, w, other: F.linear(x, w + other),
    "standardized": lambda x, w, other: F.linear(x, (w - w.mean(1, True)) / w.std(1, keepdim=True)),
    "detached": lambda x, w, other: F.linear(x, w / w.detach().norm()),
    "data": lambda x, w, other: F.linear(x, w / w.data.abs().max()),
    "row": lambda x, w, other: x @ w[3],
    "unbind": lambda x, w, other: torch.stack([x @ row for row in w.unbind()], -1),
    "iteration": lambda x, w, other: torch.stack([x @ row for row in w], -1),
    "slice": lambda x, w, other: F.linear(x, w[8:16]),
    "rows, read": lambda x, w, other: (x[:1] * w[8:16]).sum(-1),
    "chunk": lambda x, w, other: F.linear(x, w.chunk(2)[1]),
    "narrow": lambda x, w, other: F.linear(x, w.narrow(0, 4, 8)),
    "transposed": lambda x, w, other: x @ (w.T * 2),
    "flat": lambda x, w, other: x * w.flatten().norm(),
    "difference": lambda x, w, other: (x[:, None] - w).square().sum(-1),
    "in place": filled,
    "einsum": lambda x, w, other: torch.einsum("bk,nk->bn", x, w),
    "mv": lambda x, w, other: torch.mv(w, x[0]),
    "dropout that drops nothing": lambda x, w, other: F.linear(x, F.dropout(w, 0.5, False)),
}
INDEXED = {
    "rows at": lambda x, w, other: F.linear(x, w[ROWS]),
    "rows at, read": lambda x, w, other: (x[:1] * w[ROWS]).sum(-1),
}


class Own(nn.Linear):
    """A subclass that multiplies otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.weight, self.other)


class Parent(nn.Module):
    """A module that reads the weight of another one."""

    def __init__(self, *sizes: int, **options: bool) -> None:
        super().__init__()
        self.base = nn.Linear(*sizes, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, self.base.weight, self.other)


def made(kind: type[nn.Module], form) -> nn.Module:
    torch.manual_seed(0)
    model = kind(K, N, bias=False)
    model.form, model.other = form, torch.randn(N, K) / 10
    return model


def prepare(model: nn.Module, how, filter_fn=None) -> nn.Module:
    scheme, scales = how
    if isinstance(scheme, lb.BitNet):
        train.prepare_(model, scheme, lambda module, name: True)
        return model
    qat.prepare_(model, scheme, filter_fn, scales=scales)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_scale"):
                parameter.mul_(1.05)  # another one than that of the weight
    return model


def convert(model: nn.Module) -> None:
    bitnet = any(isinstance(p, lb.tensor.BitNetTensor) for p in model.parameters())
    (train if bitnet else qat).convert_(model)


def check(model: nn.Module, x: Tensor, weight: str | None = None) -> None:
    """Outputs under autograd, without, and of a copy are those of the converted model; a gradient arrives."""
    y = model(x)
    with torch.no_grad():
        others = model(x), copy.deepcopy(model)(x)
    if weight is not None:
        y.sum().backward()
        assert model.get_parameter(weight).grad.abs().sum() > 0
    convert(model)
    for found in (y, *others):
        assert torch.equal(found, model(x))


@pytest.mark.cover("values", how=lambda how: (*of_scheme(how[0]), how[1]))
@every_kind
def test_a_module_that_computes_with_its_weight(how) -> None:
    scheme, scales = how
    shares = isinstance(scheme, lb.Scheme) and isinstance(scheme.weight.granularity, lb.PerBlock)
    for name, form in (FORMS if shares else FORMS | INDEXED).items():
        kind, weight = (Parent, "base.weight") if scales == "learned" else (Own, "weight")
        model, x = made(kind, form), torch.randn(3, K)
        plain = model(x)
        prepare(model, how)
        assert not torch.equal(model(x), plain), name
        check(model, x, weight)


@pytest.mark.parametrize("how", PRESENT.values(), ids=PRESENT)
def test_products_with_the_columns_of_a_weight(how) -> None:
    for form in (lambda x, w, other: x @ w, lambda x, w, other: torch.mv(w.T, x[0])):
        model = made(Own, form)
        check(prepare(model, how), torch.randn(3, N), "weight")


@over(WEIGHT_ONLY)
def test_the_gradient_is_straight_through(scheme) -> None:
    """That of the rounded values inside the range, and that of another operand sees them."""
    model = made(Own, lambda x, w, other: w * x)
    prepare(model, (scheme, "present"))
    x = torch.randn(N, K, requires_grad=True)
    own = model.weight.fake_quantized()
    grads = torch.autograd.grad((own * x).sum(), (model.weight, x))
    model(x).sum().backward()
    assert torch.equal(model.weight.grad, grads[0]) and torch.equal(x.grad, grads[1])
    assert torch.equal(x.grad, model.weight.dequantize())


CONTRACTED = {
    "einsum": lambda x, w, other: torch.einsum("bk,nk->bn", x, w),
    "tensordot": lambda x, w, other: torch.tensordot(x, w, ([1], [1])),
    "addmv": lambda x, w, other: torch.addmv(torch.ones(N), w, x[0]),
}


@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize("form", CONTRACTED)
def test_a_contraction_rounds_its_input_as_the_converted_weight_does(form, scales) -> None:
    model, x = made(Own, CONTRACTED[form]), torch.randn(3, K)
    prepare(model, (lb.Int8DynamicActivationInt4Weight(32), scales), lambda module, name: True)
    y = model(x)
    y.sum().backward()
    assert model.weight.grad.any()
    convert(model)
    torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-5)


def test_another_contraction_reads_the_rounded_weight() -> None:
    model = made(Own, lambda x, w, other: torch.einsum("nk,mk->nm", w, w))
    prepare(model, (lb.Int8DynamicActivationInt8Weight(), "present"), lambda module, name: True)
    values = model.weight.dequantize()
    torch.testing.assert_close(model(torch.randn(3, K)), values @ values.T)


class OwnProduct(torch.autograd.Function):
    """A product as kernels for LoRA have it, unsloth's among them: its gradient reads the weight again."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.held = w
        return torch.matmul(x, w.t())

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def, override]
        return torch.matmul(grad, ctx.held), None


@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize("trains", [True, False])
def test_a_function_of_its_own_reads_the_rounded_weight(scales: str, trains: bool) -> None:
    model = made(Own, lambda x, w, other: OwnProduct.apply(x, w))
    prepare(model, (lb.Int4WeightOnly(32), scales), lambda module, name: True)
    model.weight.requires_grad_(trains)
    values, x = model.weight.dequantize().detach(), torch.randn(3, K, requires_grad=True)
    y = model(x)
    y.square().sum().backward()
    expected = x.detach() @ values.T
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, 2 * expected @ values)


class Standardized(nn.Conv2d):
    """Weight standardisation (arXiv 1903.10520)."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = w - w.mean((1, 2, 3), keepdim=True)
        spread = self.weight.flatten(1).std(1).view(-1, 1, 1, 1)
        return self._conv_forward(x, w / spread, self.bias)


class StandardizedChild(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(*sizes)

    def forward(self, x: Tensor) -> Tensor:
        return Standardized.forward(self.conv, x)


OF_CONVOLUTIONS = {
    name: how
    for name, how in (PRESENT | LEARNED).items()
    if how[0].activation is None
    and not isinstance(how[0].weight.format, lb.LookupTable)
    and not isinstance(how[0].weight.granularity, lb.PerBlock)
}


@pytest.mark.parametrize("how", list(OF_CONVOLUTIONS.values()), ids=list(OF_CONVOLUTIONS))
def test_a_convolution_with_weight_standardisation(how) -> None:
    for kind, weight in ((Standardized, "weight"), (StandardizedChild, "conv.weight")):
        torch.manual_seed(0)
        model = prepare(kind(4, 8, 3), how, lambda module, name: isinstance(module, nn.Conv2d))
        check(model, torch.randn(2, 4, 6, 6), weight)


class Table(nn.Module):
    """An embedding whose table is also read as a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(N, K)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) @ F.normalize(self.table.weight, dim=-1).T


OF_TABLES = {
    name: how
    for name, how in (PRESENT | LEARNED).items()
    if how[0].activation is None and not isinstance(how[0].weight.granularity, lb.PerBlock)
}
every_table = pytest.mark.parametrize("how", list(OF_TABLES.values()), ids=list(OF_TABLES))


@every_table
def test_an_embedding_whose_table_is_read(how) -> None:
    torch.manual_seed(0)
    model = prepare(Table(), how, lambda module, name: isinstance(module, nn.Embedding))
    check(model, ROWS, "table.weight")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, N, K) / 10)

    def forward(self, x: Tensor) -> Tensor:
        whole = (x @ F.normalize(self.up, dim=-1).mT).sum(0) + F.linear(x, self.up.mean(0))
        return whole + F.linear(x, self.up[1] * 2) + sum(F.linear(x, w + 0.1) for w in self.up)


OF_EXPERTS = {
    name: how
    for name, how in (PRESENT | LEARNED | BITNET).items()
    if name == "bitnet" or not isinstance(how[0].weight.granularity, lb.PerTensor)
}


@pytest.mark.parametrize("how", list(OF_EXPERTS.values()), ids=list(OF_EXPERTS))
def test_experts_that_a_module_computes_with(how) -> None:
    torch.manual_seed(0)
    check(prepare(Experts(), how, lambda module, name: True), torch.randn(3, K), "up")


@pytest.mark.cover("values")
@every_kind
@pytest.mark.parametrize("change", ["prune", "weight_norm", "parametrized"])
def test_what_torch_computes_from_the_weight(how, change) -> None:
    """torch's hooks and parametrizations, put on prepared layers. None where products should round their input."""
    torch.manual_seed(0)
    model = prepare(nn.Sequential(nn.Linear(K, N)), how)
    name, put = {
        "prune": ("0.weight_orig", lambda layer: prune.l1_unstructured(layer, "weight", 0.3)),
        "weight_norm": ("0.weight_v", weight_norm),
        "parametrized": ("0.parametrizations.weight.original1", parametrizations.weight_norm),
    }[change]
    put(model[0])
    if getattr(how[0], "activation", None) is not None:
        for use in (lambda: model(torch.randn(3, K)), lambda: convert(model)):
            with pytest.raises(NotImplementedError, match=f"{name[2:]}.*does not round its input"):
                use()
    elif change == "parametrized" and how[1] == "learned":
        with pytest.raises(NotImplementedError, match="remove_parametrizations"):
            convert(model)
    else:
        check(model, torch.randn(3, K), name)
        assert not isinstance(model[0], Prepared)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@pytest.mark.parametrize("undo", [qat.convert_, qat.undo_, lb.dequantize_])
def test_a_parametrized_layer_has_its_own_class_again(undo) -> None:
    model, x = nn.Sequential(nn.Linear(K, N)), torch.randn(3, K)
    qat.prepare_(model, lb.Int4WeightOnly(32))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    other = copy.deepcopy(model)
    undo(model)
    assert isinstance(other[0], Prepared) and not isinstance(model[0], Prepared)
    y = model(x) - model[0].bias
    parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)
    assert shown_class(model[0]) is nn.Linear
    assert torch.allclose(2 * (model(x) - model[0].bias), y, atol=1e-5)


@over(SCHEMES)
def test_weight_norm_of_a_converted_weight(scheme) -> None:
    for change in (weight_norm, parametrizations.weight_norm):
        model, x = nn.Sequential(nn.Linear(K, N)), torch.randn(3, K)
        lb.quantize_(model, lb.Scheme(scheme.weight))
        y = model(x)
        change(model[0])
        assert torch.allclose(model(x), y, atol=1e-5)
        model(x).sum().backward()


class Siblings(nn.Module):
    """Reads the weights of layers that share a part of their scales."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(K, N, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.q_proj.weight * 2, self.k_proj.weight[8:], self.v_proj.weight.T.mean(1)
        return F.linear(x, weights[0]).sum(-1) + F.linear(x, weights[1]).sum(-1) + x @ weights[2]


@over(WEIGHT_ONLY)
def test_siblings_that_a_module_reads(scheme) -> None:
    torch.manual_seed(0)
    model = Siblings()
    with torch.no_grad():
        model.q_proj.weight.mul_(4)
    check(prepare(model, (scheme, "present")), torch.randn(3, K), "k_proj.weight")


# ---- the master ---------------------------------------------------------------------------------------------------


@every_kind
def test_what_trains_or_stores_the_weight_reads_the_master(how) -> None:
    model = prepare(nn.Sequential(nn.Linear(K, N)), how)
    weight: nn.Parameter = model[0].weight
    master = weight.master()
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(weight * 2, master * 2) and torch.equal(weight[3], master[3])
        assert torch.equal(torch.linalg.vector_norm(weight), torch.linalg.vector_norm(master))
        average = torch.zeros(N, K).lerp_(weight, 0.1)
        assert torch.equal(average, torch.zeros(N, K).lerp_(master, 0.1))
        expected = master - 0.1 * torch.ones(N, K)
        weight.copy_(weight - 0.1 * torch.ones(N, K))  # a user's own optimizer
        assert torch.equal(weight.master(), expected)
    assert torch.equal(0.9 * weight.data, 0.9 * expected)
    assert torch.equal(weight.detach().clone().master(), expected)
    state = model.state_dict()["0.weight"]
    assert torch.equal(state.master() if isinstance(state, lb.LowbitTensor) else state, expected)
    for options in ({"weight_decay": 0.1}, {"weight_decay": 0.1, "foreach": True}):
        ours, plain = copy.deepcopy(rounded), nn.Parameter(rounded[0].weight.master().clone())
        ours[0].weight.grad = plain.grad = torch.ones(N, K)
        torch.optim.SGD([ours[0].weight], lr=0.1, **options).step()
        torch.optim.SGD([plain], lr=0.1, **options).step()
        assert torch.equal(ours[0].weight.master(), plain.detach())


class Trains(nn.Module):
    """A forward pass with an optimizer inside, as Lightning's manual optimization under DDP has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        loss = (x @ (self.layer.weight * 2).T).sum()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            return self.layer.weight * 1


@every_kind
def test_an_optimizer_inside_of_a_forward_pass(how) -> None:
    if how[1] == "learned":
        pytest.skip("their scales would train too")
    model = prepare(Trains(), how)
    model.optimizer = torch.optim.SGD([model.layer.weight], lr=0.01, weight_decay=0.5)
    before = model.layer.weight.master().clone()
    found = model(torch.randn(3, K))
    assert torch.equal(found, model.layer.weight.dequantize())
    step = before - 0.01 * (model.layer.weight.grad + 0.5 * before)
    assert torch.allclose(model.layer.weight.master(), step, atol=1e-6)
    assert not in_forward()


def test_weights_that_nothing_rounds_later_are_read_as_they_are() -> None:
    model = made(Own, FORMS["times"])
    x = torch.randn(3, K)
    y = model(x)
    train.prepare_(model, lb.Int8MixedPrecision(), lambda module, name: True)
    assert torch.equal(model(x), y)


def test_the_functions_that_keep_a_weight_are_functions_of_torch() -> None:
    for function in (Tensor.detach, Tensor.clone, Tensor.to, Tensor.copy_, Tensor.shape.__get__):
        assert function in KEEPS
    for function in (Tensor.mul, F.normalize, torch.add, Tensor.norm, torch.where):
        assert function not in KEEPS


def test_checkpointed_parts_of_a_forward_pass_read_alike() -> None:
    for reentrant in (True, False):
        model = made(Own, FORMS["cosine"])
        prepare(model, (lb.Int4WeightOnly(32), "present"))
        x = torch.randn(3, K, requires_grad=True)
        model(x).sum().backward()
        expected, model.weight.grad = model.weight.grad, None
        form = model.form
        model.form = lambda *args: checkpoint(form, *args, use_reentrant=reentrant)  # noqa: B023
        model(x).sum().backward()
        assert torch.equal(model.weight.grad, expected)


# ---- what a trace says ----------------------------------------------------------------------------------------------


@every_kind
def test_a_trace_says_rounded_of_what_was_rounded(how) -> None:
    model = prepare(made(Own if how[1] != "learned" else Parent, FORMS["centred"]), how)
    traced = lb.trace(model, torch.randn(3, K))
    assert {p.why for p in traced.products} == {"rounded values, multiplied in high precision"}
    assert all("QAT" in p.weight or p.weight == "BitNet" for p in traced.products)
    masters = prepare(made(Own, lambda x, w, other: F.linear(x, other)), how)
    traced = lb.trace(masters, torch.randn(3, K), backward=False)
    assert not any("rounded" in p.why for p in traced.products)


# ---- sparse gradients, torch.func -----------------------------------------------------------------------------------


@every_table
def test_a_sparse_embedding(how) -> None:
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(N, K, padding_idx=3, sparse=sparse))
        prepare(model, how, lambda module, name: True)
        y = model(ROWS.view(2, 2))
        (y * torch.arange(K)).sum().backward()
        weight = model[0].weight
        assert weight.grad.is_sparse == sparse
        if sparse:
            torch.optim.SparseAdam([weight]).step()
        grads = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()]
        found.append((y, *grads))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))
    assert torch.equal(found[0][0], found[1][0])


TRAINED = {
    **PRESENT,
    **LEARNED,
    **BITNET,
    "int8-weight": (lb.Int8Weight(), ""),
    "int8-mixed": (lb.Int8MixedPrecision(always=True), ""),
}


@pytest.mark.parametrize("how", list(TRAINED.values()), ids=list(TRAINED))
def test_torch_func_is_refused_by_one_message(how) -> None:
    model, x = nn.Sequential(nn.Linear(K, 48)), torch.randn(3, K)
    if isinstance(how[0], lb.Scheme):
        prepare(model, how)
    else:
        train.prepare_(model, how[0], lambda module, name: True)
    runs = [
        lambda: torch.func.grad(lambda x: model(x).sum())(x),
        lambda: torch.vmap(model)(x[None]),
        lambda: torch.func.jacrev(model)(x),
    ]
    if type(model[0].weight).rounds_reads:
        parameters = dict(model.named_parameters())
        call = torch.func.functional_call
        runs.append(lambda: torch.func.grad(lambda p: call(model, p, (x,)).sum())(parameters))
    for run in runs:
        message = r"Tensor.*torch\.func's transforms.*torch\.autograd\.grad"
        with pytest.raises(NotImplementedError, match=message):
            run()
