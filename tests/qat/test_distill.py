"""The loss of distillation against float64, its memory, and the teacher that is the same model."""

from __future__ import annotations

import copy
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit import qat
from lowbit.qat import distillation_loss
from tests.schemes import relative_error
from tests.train.problems import values

INT4 = lb.Int4WeightOnly(group_size=16)
TOKENS = torch.tensor([[1, 2, 3, 3, 7], [4, 5, 19, 0, 0]])


def exact(
    student: Tensor, teacher: Tensor, labels: Tensor | None, t: float, share: float
) -> tuple[Tensor, Tensor]:
    """The loss and its gradient in float64, by torch's own functions."""
    s = student.detach().double().requires_grad_()
    rows, taught = s.reshape(-1, s.shape[-1]), teacher.double().reshape(-1, s.shape[-1])
    kept = slice(None) if labels is None else labels.reshape(-1) != -100
    kl = F.kl_div(
        torch.log_softmax(rows / t, -1)[kept],
        torch.log_softmax(taught / t, -1)[kept],
        reduction="batchmean",
        log_target=True,
    )
    loss = share * t**2 * kl
    if labels is not None:
        loss = loss + (1 - share) * F.cross_entropy(rows, labels.reshape(-1))
    loss.backward()
    return loss.detach(), s.grad


@pytest.mark.parametrize("chunk", [1, 100, 2**22])
@pytest.mark.parametrize("share", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_against_float64(chunk, share, temperature, monkeypatch) -> None:
    monkeypatch.setattr("lowbit.numerics.divergence.CHUNK_ELEMENTS", chunk)
    student, teacher = values(3, 5, 37).requires_grad_(), values(3, 5, 37, seed=1)
    labels = torch.arange(15).view(3, 5) * 7 % 37
    labels[1, 2:] = -100
    loss = distillation_loss(student, teacher, labels, temperature=temperature, kl_weight=share)
    (3 * loss).backward()
    expected, grad = exact(student, teacher, labels, temperature, share)
    assert loss.dtype is torch.float32 and abs(loss - expected) < 1e-6 * expected
    assert relative_error(student.grad, 3 * grad) < 1e-6
    assert not student.grad[1, 2:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sixteen_bits(dtype) -> None:
    student, teacher = values(7, 131).to(dtype).requires_grad_(), values(7, 131, seed=1).to(dtype)
    loss = distillation_loss(student, teacher)
    loss.backward()
    expected, grad = exact(student, teacher, None, 1.0, 1.0)
    assert abs(loss - expected) < 1e-6 * expected
    assert student.grad.dtype is dtype and relative_error(student.grad, grad) < 4e-3


def test_strided_logits_and_no_gradient_for_the_teacher() -> None:
    whole = values(4, 9, 20).requires_grad_()
    teacher = values(4, 8, 20, seed=1).requires_grad_()
    distillation_loss(whole[:, :-1], teacher).backward()
    _, grad = exact(whole[:, :-1], teacher.detach(), None, 1.0, 1.0)
    assert relative_error(whole.grad[:, :-1], grad) < 1e-6
    assert teacher.grad is None and not whole.grad[:, -1].any()


def test_equal_logits() -> None:
    student = (30 * values(6, 11)).requires_grad_()
    loss = distillation_loss(student, student.detach())
    loss.backward()
    assert loss == 0 and not student.grad.any()


def test_rows_that_do_not_count_may_hold_anything() -> None:
    student, teacher = values(4, 11), values(4, 11, seed=1)
    labels = torch.tensor([3, -100, 5, -100])
    kept = distillation_loss(student[::2], teacher[::2], labels[::2], kl_weight=0.5)
    student[1], teacher[3] = torch.nan, torch.inf
    student.requires_grad_()
    loss = distillation_loss(student, teacher, labels, kl_weight=0.5)
    loss.backward()
    assert torch.equal(loss, kept) and student.grad.isfinite().all()
    nothing = distillation_loss(student, teacher, torch.full((4,), -100), kl_weight=0.5)
    (grad,) = torch.autograd.grad(nothing, student)
    assert nothing == 0 and not grad.any()
    empty = distillation_loss(torch.zeros(0, 11, requires_grad=True), torch.zeros(0, 11))
    empty.backward()
    assert empty == 0


def test_classes_that_the_teacher_excludes() -> None:
    student, teacher = values(2, 5).requires_grad_(), values(2, 5, seed=1)
    teacher[:, 3] = -torch.inf
    loss = distillation_loss(student, teacher)
    loss.backward()
    p = torch.softmax(teacher.double(), -1)
    q = torch.softmax(student.detach().double(), -1)
    expected = torch.where(p > 0, p * (p / q).log(), 0.0).sum() / 2
    assert abs(loss - expected) < 1e-6
    assert relative_error(student.grad, (q - p) / 2) < 1e-6


def test_micro_batches_count_together() -> None:
    student, teacher = values(6, 9).requires_grad_(), values(6, 9, seed=1)
    labels = torch.tensor([1, -100, -100, 3, 4, 5])
    whole = distillation_loss(student, teacher, labels, kl_weight=0.5)
    parts = [
        distillation_loss(student[at], teacher[at], labels[at], kl_weight=0.5, num_items=4)
        for at in (slice(0, 3), slice(3, 6))
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_compiled_loss() -> None:
    student, teacher = values(8, 33).requires_grad_(), values(8, 33, seed=1)
    run = torch.compile(distillation_loss, backend="aot_eager", fullgraph=True)
    loss = run(student, teacher)
    loss.backward()
    expected, grad = exact(student, teacher, None, 1.0, 1.0)
    assert abs(loss - expected) < 1e-6 and relative_error(student.grad, grad) < 1e-6


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"teacher_logits": torch.zeros(4, 8)}, ValueError, "accepted: one shape"),
        ({"teacher_logits": None}, TypeError, "teacher_logits must be a floating tensor"),
        ({"student_logits": torch.zeros(4, 9).long()}, TypeError, "got torch.int64"),
        ({"temperature": 0.0}, ValueError, "temperature must be above 0, got 0.0"),
        ({"kl_weight": 1.5}, ValueError, "from 0 to 1, got 1.5"),
        ({"kl_weight": 0.5}, ValueError, "needs labels"),
        ({"labels": torch.zeros(3).long()}, ValueError, r"integers of shape \(4,\)"),
        ({"labels": torch.zeros(4)}, ValueError, "torch.float32"),
        (
            {"labels": torch.tensor([0, 8, 9, -100])},
            ValueError,
            r"label 9 is not a class; .* 0 to 8, or",
        ),
        ({"labels": torch.tensor([0, -1, 3, 4])}, ValueError, "label -1 is not a class"),
    ],
)
def test_refused_arguments(change, error, match) -> None:
    arguments = {"student_logits": torch.zeros(4, 9), "teacher_logits": torch.zeros(4, 9)}
    with pytest.raises(error, match=match):
        distillation_loss(**{**arguments, **change})


# ---- memory -----------------------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """The most bytes at once of storages that operations made inside, other than those of `known` tensors."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.alive = {t.untyped_storage()._cdata: 0 for t in known}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self.alive:
                self._enter(t.untyped_storage())
        return result

    def _enter(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.alive[key] = size
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._leave, key)

    def _leave(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)


def peak_of(loss: Any, student: Tensor, teacher: Tensor) -> int:
    student.requires_grad_()
    with Peak(student, teacher) as seen:
        loss(student, teacher).backward()
    return seen.most


def test_memory_is_that_of_the_gradient_and_a_chunk(monkeypatch) -> None:
    """bfloat16 logits [512, 4001]: 4 MB. The plain formula takes over 8 times that, in float32 copies."""
    monkeypatch.setattr("lowbit.numerics.divergence.CHUNK_ELEMENTS", 2**15)
    student, teacher = (values(512, 4001, seed=s).bfloat16() for s in (0, 1))

    def plain(student: Tensor, teacher: Tensor) -> Tensor:
        log_p = torch.log_softmax(teacher.float(), -1)
        return F.kl_div(
            torch.log_softmax(student.float(), -1), log_p, reduction="batchmean", log_target=True
        )

    ours = peak_of(distillation_loss, student, teacher)
    student.grad = None
    assert ours < 1.2 * student.nbytes
    assert peak_of(plain, student, teacher) > 8 * student.nbytes


# ---- Distillation -----------------------------------------------------------------------------------------------


class Outputs(NamedTuple):
    logits: Tensor
    hidden_states: tuple[Tensor, ...]


class Language(nn.Module):
    """Tokens to logits: an embedding, a block with batch norm and dropout, a tied head."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.block = nn.Sequential(
            nn.Linear(32, 48), nn.SiLU(), nn.Dropout(dropout), nn.Linear(48, 32)
        )
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Outputs:
        x = self.embedding(input_ids)
        h = (
            checkpoint(self.block, x, use_reentrant=False)
            if self.checkpointed and self.training
            else self.block(x)
        )
        y = self.norm((x + h).flatten(0, 1)).view(x.shape)
        return Outputs(self.head(y), (x, y))


def language(**options: Any) -> Language:
    torch.manual_seed(0)
    model = Language(**options)
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    qat.prepare_(model, INT4, lambda m, name: isinstance(m, nn.Linear | nn.Embedding))
    return model


def test_the_teacher_is_the_model_without_rounding() -> None:
    model = language()
    model.eval()
    with torch.no_grad():
        student = model(TOKENS).logits
        with qat.high_precision(model):
            teacher = model(TOKENS).logits
    found = qat.Distillation(model)(TOKENS)
    assert torch.equal(found, distillation_loss(student, teacher)) and found > 0
    labels = TOKENS.masked_fill(TOKENS == 0, -100)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    found = qat.Distillation(model, kl_weight=0.25, temperature=2.0)(TOKENS, labels=labels)
    expected = distillation_loss(student, teacher, shifted, kl_weight=0.25, temperature=2.0)
    assert torch.equal(found, expected)
    aligned = qat.Distillation(model, kl_weight=0.25, shift_labels=False)
    expected = distillation_loss(student, teacher, labels, kl_weight=0.25)
    assert torch.equal(aligned(TOKENS, labels=labels), expected)
    qat.disable_(model)
    assert qat.Distillation(model)(TOKENS) == 0


def test_padded_tokens_do_not_count() -> None:
    model = language().eval()
    mask = (TOKENS != 0).long()
    found = qat.Distillation(model)(input_ids=TOKENS, attention_mask=mask)
    labels = TOKENS.masked_fill(mask == 0, -100)
    expected = qat.Distillation(model, shift_labels=False)(input_ids=TOKENS, labels=labels)
    assert torch.equal(found, expected)
    both = qat.Distillation(model)(input_ids=TOKENS, attention_mask=mask, labels=TOKENS)
    assert torch.equal(both, qat.Distillation(model)(input_ids=TOKENS, labels=labels))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_teacher_leaves_no_trace(device: str) -> None:
    """The student's dropout, the batch norm's statistics and the modes are those of training without a teacher."""
    model, tokens = language(dropout=0.5).to(device), TOKENS.to(device)
    model.block[1].eval()
    alone = copy.deepcopy(model)
    modes = [m.training for m in model.modules()]
    torch.manual_seed(3)
    student = alone(tokens).logits
    state = random_state(device)
    torch.manual_seed(3)
    seen: list[Tensor] = []
    handle = model.register_forward_hook(lambda m, args, out: seen.append(out.logits))
    loss = qat.Distillation(model)(tokens)
    handle.remove()
    teacher, found = seen
    assert torch.equal(found, student) and not teacher.requires_grad
    assert torch.equal(random_state(device), state)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(model.norm.running_mean, alone.norm.running_mean)
    loss.backward()
    assert model.head.weight.grad.any() and model.head.weight.off is None


def random_state(device: str) -> Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


@pytest.mark.gpu
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_against_float64_on_a_gpu(share: float) -> None:
    student, teacher = (values(300, 32001, seed=s).cuda().bfloat16() for s in (0, 1))
    labels = torch.arange(300, device="cuda") * 101 % 32001
    labels[::7] = -100
    loss = distillation_loss(student.requires_grad_(), teacher, labels, kl_weight=share)
    loss.backward()
    expected, grad = exact(student, teacher, labels, 1.0, share)
    assert abs(loss - expected) < 1e-5 * expected
    assert relative_error(student.grad, grad) < 4e-3


def test_gradients_are_those_of_logits_given_by_hand() -> None:
    model = language(checkpointed=True)
    other = copy.deepcopy(model)
    other.checkpointed = False
    qat.Distillation(model)(TOKENS).backward()
    modes = other.training
    with torch.no_grad(), qat.high_precision(other.eval()):
        teacher = other(TOKENS).logits
    distillation_loss(other.train(modes)(TOKENS).logits, teacher).backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_another_teacher() -> None:
    model, teacher = language().eval(), Language(dropout=0.5)
    taught = copy.deepcopy(teacher).eval()(TOKENS).logits
    expected = distillation_loss(model(TOKENS).logits, taught)
    assert torch.equal(qat.Distillation(model, teacher)(TOKENS), expected)
    assert teacher.training and all(p.grad is None for p in teacher.parameters())
    assert torch.equal(qat.Distillation(model, lambda tokens: taught)(TOKENS), expected)


def test_hidden_states() -> None:
    model = language().eval()
    labels = TOKENS.masked_fill(TOKENS == 0, -100)
    plain = qat.Distillation(model, shift_labels=False)(TOKENS, labels=labels)
    found = qat.Distillation(model, hidden_weight=0.5, shift_labels=False)(TOKENS, labels=labels)
    own = model(TOKENS).hidden_states
    with qat.high_precision(model):
        other = model(TOKENS).hidden_states
    kept = labels != -100
    errors = [
        (a - b)[kept].square().sum() / b[kept].square().sum()
        for a, b in zip(own, other, strict=True)
    ]
    torch.testing.assert_close(found - plain, 0.5 * sum(errors) / 2, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="needs as many hidden_states"):
        qat.Distillation(nn.Linear(16, 8), nn.Linear(16, 8), hidden_weight=1.0)(values(2, 16))


def test_hidden_states_of_a_micro_batch_count_by_its_share_of_tokens() -> None:
    model = language().eval()
    labels = TOKENS.masked_fill(TOKENS == 0, -100)
    counted = int((labels != -100).sum())

    def of_hidden(num_items: int | None) -> Tensor:
        with_hidden, without = (
            qat.Distillation(model, hidden_weight=weight, shift_labels=False).loss_and_outputs(
                model, (TOKENS,), labels, {}, num_items
            )[0]
            for weight in (0.5, 0.0)
        )
        return with_hidden - without

    whole = of_hidden(None)
    torch.testing.assert_close(4 * of_hidden(4 * counted), whole, rtol=1e-4, atol=1e-6)


def test_compiled_model() -> None:
    torch._dynamo.reset()
    model = language()
    expected = qat.Distillation(copy.deepcopy(model))(TOKENS)
    counted = CompileCounterWithBackend("aot_eager")
    distill = qat.Distillation(torch.compile(model, backend=counted, fullgraph=True))
    losses = [distill(TOKENS) for _ in range(3)]
    sum(losses).backward()
    assert counted.frame_count == 2
    assert abs(losses[0] - expected) < 1e-4 * expected
    assert model.head.weight.grad.any()


def test_training_brings_the_quantized_model_to_a_frozen_teacher() -> None:
    model = language()
    teacher = copy.deepcopy(model)
    qat.undo_(teacher)
    distill = qat.Distillation(model, teacher)
    optimizer = lb.optim.AdamW8bit(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(40):
        loss = distill(TOKENS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_refused() -> None:
    model = language()
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        qat.Distillation(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="teacher must be"):
        qat.Distillation(model, "teacher")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="teacher is the prepared model itself"):
        qat.Distillation(model, model)
    with pytest.raises(ValueError, match=r"temperature must be .*, got -1\.0"):
        qat.Distillation(model, temperature=-1.0)
    with pytest.raises(ValueError, match="has no prepared weights"):
        qat.Distillation(Language())(TOKENS)
    with pytest.raises(ValueError, match="needs labels"):
        qat.Distillation(model, kl_weight=0.5)(TOKENS)
    with pytest.raises(TypeError, match="outputs of type tuple without logits"):
        qat.Distillation(model, lambda tokens: (1, 2))(TOKENS)
