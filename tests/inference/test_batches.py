"""Batches of `lowbit.calibrate`: their forms, masks and devices, and options that nothing would read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.inference import GPTQ, Search
from tests.inference.test_calibrate import BATCHES, INT4, llama, same, state


def test_empty_batches() -> None:
    model, other = llama(), llama()
    for batches in ([], [torch.empty(0, 4, dtype=torch.long)], iter(())):
        with pytest.raises(ValueError, match=r"got \d batches, none of which"):
            lb.calibrate(model, INT4, batches)
    lb.calibrate(model, INT4, [torch.empty(0, 4, dtype=torch.long), *BATCHES])
    lb.calibrate(other, INT4, BATCHES)
    assert same(model, other)


def test_forms_of_batches() -> None:
    """A generator, tuples and mappings, which say which tokens count."""
    models = [llama() for _ in range(3)]
    lb.calibrate(models[0], INT4, BATCHES)
    lb.calibrate(models[1], INT4, ((b,) for b in BATCHES))
    lb.calibrate(models[2], INT4, [{"tokens_BT": b} for b in BATCHES])
    assert same(models[0], models[1]) and same(models[0], models[2])


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = F.gelu(self.first(x))
        return self.second(h.flatten(0, 1)).view(*x.shape[:2], -1)


def test_masked_tokens_do_not_count() -> None:
    x, mask = torch.randn(3, 10, 64), torch.ones(3, 10, dtype=torch.long)
    mask[0, 4:], mask[2, :6] = 0, 0
    models = [Masked(), Masked()]
    padded = torch.where(mask.bool().unsqueeze(-1), x, 100.0)
    reports = [
        lb.calibrate(models[0], INT4, [{"x": padded, "attention_mask": mask}]),
        lb.calibrate(models[1], INT4, [x[mask.bool()][None]]),
    ]
    assert {layer.rows for r in reports for layer in r.layers.values()} == {int(mask.sum())}
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        if isinstance(a, lb.AffineTensor):
            assert torch.equal(a.codes, b.codes)


def test_a_batch_whose_mask_is_zero_is_left_out() -> None:
    x, ones = torch.randn(2, 10, 64), torch.ones(2, 10, dtype=torch.long)
    none = {"x": x, "attention_mask": torch.zeros_like(ones)}
    with pytest.raises(
        ValueError, match=r"got 1 batches, none of which.*with a 1 in attention_mask"
    ):
        lb.calibrate(Masked(), INT4, [none])
    models = [Masked(), Masked()]
    own = {"x": x.flip(1), "attention_mask": ones}
    for model, batches in zip(models, ([own], [none, own]), strict=True):
        assert lb.calibrate(model, INT4, batches).layers["first.weight"].rows == 20
    assert same(*models)


def test_the_batch_that_the_model_does_not_take_is_named() -> None:
    """Values that are not ids, ids beyond the vocabulary, another keyword."""
    model = llama()
    before = state(model)
    for wrong in (torch.randn(2, 8), torch.full((2, 8), 96), {"ids": BATCHES[1]}):
        with pytest.raises(ValueError, match=r"does not run on batch 1: .*; accepted: keyword"):
            lb.calibrate(model, INT4, [BATCHES[0], wrong])
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_few_tokens_are_reported() -> None:
    """63 rows for 64 inputs, and as many as there are."""
    for rows, is_few in ((63, True), (64, False)):
        report = lb.calibrate(nn.Sequential(nn.Linear(64, 32)), INT4, [torch.randn(rows, 64)])
        assert report.layers["0.weight"].has_few_rows == is_few
        assert ("0.weight saw fewer tokens than inputs" in str(report)) == is_few
    report = lb.calibrate(nn.Sequential(nn.Linear(64, 32)), INT4, [torch.randn(3, 64)], steps=[])
    assert report.notes == []  # no step reads a Hessian


def test_a_module_for_a_format() -> None:
    """Scales of the dtype that it stores; what it cannot hold is refused while all weights are plain."""
    model = llama(tied=False)
    lb.calibrate(model, {"head": None, "*": INT4}, BATCHES, steps=[Search()], format="gptq")
    assert model.blocks[0].attention.out.weight.scale.dtype is torch.float16
    plain = llama(tied=False)
    before = state(plain)

    def ran(*arguments: object) -> None:
        raise AssertionError("a batch ran")

    plain.register_forward_pre_hook(ran)
    for scheme, format, match in (
        ({"embedding": lb.Int8WeightOnly(), "*": INT4}, "compressed-tensors", "of an embedding"),
        (INT4, "awk", "accepted: lowbit"),
        (INT4, "onnx", "holds a program"),
        (lb.Int4WeightOnly(16), "gguf", "cannot hold weights of this scheme"),
    ):
        with pytest.raises(lb.formats.FormatError, match=match):
            lb.calibrate(plain, scheme, BATCHES, format=format)
    assert all(torch.equal(before[name], t) for name, t in plain.state_dict().items())


@pytest.mark.gpu
def test_batches_on_another_device() -> None:
    models = [llama().cuda() for _ in range(3)]
    lb.calibrate(models[0], INT4, BATCHES)
    lb.calibrate(models[1], INT4, [b.cuda() for b in BATCHES])
    lb.calibrate(models[2], INT4, BATCHES, cache=None)
    assert same(models[0], models[1]) and same(models[0], models[2])


def test_the_context_form_stays() -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    scheme = lb.Int8StaticActivationInt8Weight()
    with lb.calibrate(model, scheme, lambda module, name: True) as ranges:
        model(torch.randn(8, 64))
    assert list(ranges) == ["0"]
    with pytest.raises(TypeError, match="steps and blocks need batches"):
        lb.calibrate(model, scheme, blocks=[])  # type: ignore[call-overload]
    for option in (
        {"step": [GPTQ()]},
        {"format": "gguf"},
        {"out": "x"},
        {"device": "cuda"},
        {"cache": None},
    ):
        with pytest.raises(
            TypeError, match=f"{next(iter(option))}: not read by `with lowbit.calib"
        ):
            lb.calibrate(model, scheme, **option)
    with pytest.raises(TypeError, match="steps must be a list of steps"):
        lb.calibrate(model, scheme, [torch.randn(8, 64)], steps=["gptq"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cache": "folder"},
            r"cache is 'folder'; accepted: a device, None, or a folder that exists, as a pathlib",
        ),
        ({"method": "best"}, "unknown method 'best'; accepted: 'minmax'"),
        ({"device": "cuda"}, "device: for a folder alone"),
        ({"method": "minmax"}, "method: for static activations, which no weight's scheme has"),
        ({"lossy": True}, "lossy says what a format may lose"),
        ({"cache": None, "blocks": iter([])}, "cache: for hidden states between blocks"),
        ({"batches": None, "cache": "meta"}, "cache: not read without"),
        ({"batches": None, "blocks": []}, "blocks: not read without"),
        ({"batches": None, "method": "minmax"}, "method: not read without"),
    ],
)
def test_options_that_nothing_would_read_are_refused(options: dict, message: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    given = {"batches": [torch.randn(8, 64)], "steps": [Search()], **options}
    with pytest.raises((TypeError, ValueError), match=message):
        lb.calibrate(model, lb.Int8WeightOnly(), **given)


def test_filters_that_nothing_would_read_are_refused() -> None:
    model, scheme = nn.Sequential(nn.Linear(64, 32)), lb.Int8StaticActivationInt8Weight()

    def every(module: nn.Module, name: str) -> bool:
        return True

    with pytest.raises(TypeError, match=r"two filters, .*every.* and filter_fn=.*every"):
        lb.calibrate(model, scheme, every, every)
    lb.qat.prepare_(model, scheme)
    with (
        pytest.raises(TypeError, match=r"filter_fn=.*every.* without a scheme"),
        lb.calibrate(model, None, every),
    ):
        pass


def test_static_scales_in_the_same_call() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    batches = [torch.randn(16, 64) for _ in range(3)]
    scheme = lb.Int8StaticActivationInt8Weight()
    lb.calibrate(models[0], scheme, batches)
    with lb.calibrate(models[1], scheme):
        for x in batches:
            models[1](x)
    lb.quantize_(models[1], scheme)
    for i in (0, 2):
        assert torch.equal(models[0][i].weight.input_scale, models[1][i].weight.input_scale)


# ---- layers -----------------------------------------------------------------------------------------------------
