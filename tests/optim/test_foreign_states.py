"""Checkpoints of torchao's and bitsandbytes' optimizers load: the same codes where the formats agree, else values."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from lowbit import optim
from lowbit.tensor import CodebookTensor
from tests.optim.problems import rand

pytestmark = pytest.mark.filterwarnings("ignore")  # of the other packages

SHAPES = [(16, 512), (64,), (12, 384), (3, 64, 256), (16, 4, 3, 3), (8, 8)]
"""The blocks of the third are not those of its rows; the others of 4096 elements have the same blocks."""
SAME_BLOCKS = {(16, 512), (3, 64, 256)}


def parameters():
    return [nn.Parameter(rand(*shape, seed=i)) for i, shape in enumerate(SHAPES)]


def stepped(cls, **options):
    """An optimizer of another package after two steps."""
    params = parameters()
    optimizer = cls(params, lr=1e-2, **options)
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = rand(*p.shape, seed=100 + 10 * step + i)
        with torch.compiler.set_stance("force_eager"):  # torchao compiles a step a shape
            optimizer.step()
    return optimizer


def decoded(value):
    return value.dequantize() if isinstance(value, CodebookTensor) else value


def relative(found, expected):
    return float((decoded(found).float() - expected).norm() / expected.norm())


ROUNDED = {"4bit": 0.3, "8bit": 0.02, "float8": 0.04, "bf16": 4e-3, "fp32": 1e-6}
"""The most that the formats lose of a state."""


@pytest.mark.parametrize("state", ROUNDED)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "_AdamW"])
def test_states_of_torchao(name, state):
    torchao = pytest.importorskip("torchao.optim")
    theirs = stepped(getattr(torchao, name), weight_decay=0.2, betas=(0.8, 0.95))
    saved = theirs.state_dict()
    cls = optim.Adam if name == "Adam8bit" else optim.AdamW
    ours = cls(parameters(), state=state)
    ours.load_state_dict(saved)
    group = ours.param_groups[0]
    assert (float(group["lr"]), group["betas"]) == (pytest.approx(1e-2), (0.8, 0.95))
    assert group["weight_decay"] == 0.2
    for i, p in enumerate(group["params"]):
        assert ours.state[p]["step"] == 2
        for key in ("exp_avg", "exp_avg_sq"):
            value = saved["state"][i][key]
            expected = value.dequantize() if hasattr(value, "dequantize") else value
            expected = expected.float()
            found = ours.state[p][key]
            assert relative(found, expected) < ROUNDED[state], (key, p.shape)
            same = state == {"AdamW8bit": "8bit", "Adam8bit": "8bit", "AdamWFp8": "float8"}.get(
                name
            )
            if same and tuple(p.shape) in SAME_BLOCKS:
                codes = value.codes.view(torch.uint8)
                assert torch.equal(found.codes.flatten(), codes.flatten())
                assert torch.equal(found.scale.flatten(), value.scale)
    for i, p in enumerate(group["params"]):
        p.grad = rand(*p.shape, seed=i)
    ours.step()
    assert all(p.isfinite().all() for p in group["params"])


def test_states_of_torchao_from_a_file():
    torchao = pytest.importorskip("torchao.optim")
    file = io.BytesIO()
    torch.save(stepped(torchao.AdamW8bit).state_dict(), file)
    file.seek(0)
    ours = optim.AdamW8bit(parameters())
    ours.load_state_dict(torch.load(file))
    offloaded = optim.CPUOffloadOptimizer(parameters(), optim.AdamW8bit)
    file.seek(0)
    offloaded.load_state_dict(torch.load(file))
    first = offloaded.param_groups[0]["params"][0]
    own = ours.state[ours.param_groups[0]["params"][0]]
    assert torch.equal(offloaded.state[first]["exp_avg"].codes, own["exp_avg"].codes)


OF_BITSANDBYTES = {
    "AdamW8bit": (optim.AdamW8bit, ["exp_avg"], ["exp_avg_sq"], {}),
    "Adam8bit": (optim.Adam8bit, ["exp_avg"], ["exp_avg_sq"], {}),
    "AdamW": (optim.AdamW8bit, ["exp_avg"], ["exp_avg_sq"], {}),
    "Lion8bit": (optim.Lion8bit, ["exp_avg"], [], {}),
    "SGD8bit": (optim.SGD8bit, ["momentum_buffer"], [], {"momentum": 0.8}),
    "AdEMAMix8bit": (
        optim.AdEMAMix8bit,
        ["exp_avg", "exp_avg_slow"],
        ["exp_avg_sq"],
        {"t_alpha": 30, "t_beta3": 30},
    ),
}


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("name", OF_BITSANDBYTES)
def test_states_of_bitsandbytes(name, is_wrapped):
    bnb = pytest.importorskip("bitsandbytes")
    cls, first, second, options = OF_BITSANDBYTES[name]
    saved = stepped(getattr(bnb.optim, name), weight_decay=0.2, **options).state_dict()
    key = "__bnb_optimizer_quant_state__"
    states = {i: {**entry, **entry.get(key, {})} for i, entry in saved["state"].items()}
    if not is_wrapped:  # as versions before 0.50
        saved = {**saved, "state": {i: {**e} for i, e in states.items()}}
        for entry in saved["state"].values():
            entry.pop(key, None)
    ours = cls(parameters(), **({"momentum": 0.1} if name == "SGD8bit" else {}))
    ours.load_state_dict(saved)
    group = ours.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (1e-2, 0.2)
    assert group.get("momentum", 0.8) == 0.8 and group.get("t_alpha_beta3", 30) == 30
    for i, p in enumerate(group["params"]):
        assert ours.state[p]["step"] == 2
        for number, names in ((1, first), (2, second)):
            for j, moment in enumerate(names):
                check_moment(
                    ours.state[p][moment], states[i], number, j if len(names) > 1 else None
                )
    for i, p in enumerate(group["params"]):
        p.grad = rand(*p.shape, seed=i)
    ours.step()
    assert all(p.isfinite().all() for p in group["params"])


def check_moment(found, entry, number, place):
    state, scale = entry[f"state{number}"], entry.get(f"absmax{number}")
    if place is not None:
        state, scale = state[place], None if scale is None else scale[place]
    if scale is None:
        assert relative(found, state) < 0.03
        return
    each = scale.repeat_interleave(256)[: state.numel()].view(state.shape)
    expected = entry[f"qmap{number}"][state.int()] * each
    assert relative(found, expected) < 0.02
    if tuple(state.shape) in SAME_BLOCKS and isinstance(found, CodebookTensor):
        assert torch.equal(found.codes.flatten(), state.flatten())
        assert torch.equal(found.scale.flatten(), scale)


def test_what_of_bitsandbytes_has_no_place():
    state = {"step": 1, "state1": torch.zeros(8, 8, dtype=torch.uint8), "max1": torch.ones(1)}
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "params": [0]}
    saved = {"state": {0: state}, "param_groups": [group]}
    lion = optim.Lion8bit([nn.Parameter(torch.zeros(8, 8))])
    with pytest.raises(ValueError, match=r"one scale a tensor.*accepted: its blockwise states"):
        lion.load_state_dict(saved)
    saved["state"][0] = {**state, "qmap1": torch.zeros(256), "absmax1": torch.ones(3)}
    del saved["state"][0]["max1"]
    with pytest.raises(ValueError, match=r"has 3 scales; accepted: one for each 256 or 2048"):
        lion.load_state_dict(saved)
    saved["state"][0] = {"step": 1, "state1": torch.zeros(8, 8)}
    sgd = optim.SGD8bit([nn.Parameter(torch.zeros(8, 8))])
    saved["param_groups"][0]["betas"] = (0.0, 0)
    with pytest.raises(ValueError, match=r"state has \['state1', 'step'\], SGD8bit takes"):
        sgd.load_state_dict(saved)
    mix = optim.AdEMAMix([nn.Parameter(torch.zeros(8, 8))])
    saved["param_groups"][0] |= {"betas": (0.9, 0.99, 0.999), "t_alpha": 3, "t_beta3": None}
    with pytest.raises(ValueError, match="t_alpha=3 and t_beta3=None"):
        mix.load_state_dict(saved)


def test_tensors_of_unknown_packages_are_named():
    from torch.testing._internal.two_tensor import TwoTensor

    param = nn.Parameter(torch.zeros(8, 8))
    adam = optim.AdamW8bit([param])
    strange = TwoTensor(torch.zeros(8, 8), torch.zeros(8, 8))
    entry = {"step": 1, "exp_avg": strange, "exp_avg_sq": torch.zeros(8, 8)}
    saved = {"state": {0: entry}, "param_groups": [{"params": [0]}]}
    with pytest.raises(
        ValueError, match=r"parameter 0: exp_avg is a .*TwoTensor, which lowbit does"
    ):
        adam.load_state_dict(saved)
    assert not adam.state


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Muon"])
def test_states_of_torch(name):
    """`test_against_torch` and `test_muon` compare further steps."""
    options = {"momentum": 0.9} if name == "SGD" else {}
    shapes = [(16, 512), (12, 384)]
    theirs = getattr(torch.optim, name)(
        [nn.Parameter(rand(*s)) for s in shapes], lr=1e-2, **options
    )
    for p in theirs.param_groups[0]["params"]:
        p.grad = rand(*p.shape, seed=3)
    theirs.step()
    ours = getattr(optim, name)([nn.Parameter(rand(*s)) for s in shapes], state="fp32", **options)
    ours.load_state_dict(theirs.state_dict())
    pairs = zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True)
    for p, q in pairs:
        for key, expected in theirs.state[q].items():
            assert torch.equal(ours.state[p][key].float(), expected.float()), key
