"""The loss of distillation: Kullback-Leibler divergence from a teacher's logits, and a share of the cross-entropy.

With logits t of the teacher and s of the student, a temperature T, a share w and N counted tokens

    loss = 1/N · Σ over tokens of  w · T² · KL(softmax(t/T) ‖ softmax(s/T)) + (1 − w) · CE(s, label)
    gradient by s = 1/N · (w · T · (softmax(s/T) − softmax(t/T)) + (1 − w) · (softmax(s) − onehot(label)))

Where T is large, T² makes the gradients of the first term independent of T (Hinton et al., arXiv 1503.02531,
section 2).

All arithmetic is float32. The vocabulary may be large: float32 copies of all logits would take more memory than the
model's activations. So forward and backward take a few tokens at a time. Between them autograd keeps the logits as they
are, and two numbers a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowbit.numerics.settings import check_nonnegative, check_number, check_positive, is_whole
from lowbit.numerics.sharded import is_dtensor

CHUNK_ELEMENTS = 2**22
"""How many logits are in float32 at a time: 16 MiB a copy."""


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 1.0,
    kl_weight: float = 1.0,
    ignore_index: int = -100,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """KL(teacher ‖ student) and a share of the cross-entropy, the mean over counted tokens, as a float32 scalar.

    Args:
        student_logits: [..., V], any floating dtype; gets the gradient, in its dtype.
        teacher_logits: [..., V] of the same shape; gets none.
        labels: [...], the class of each row of logits, already shifted for a language model. A row with `ignore_index`
            is not counted in either term. None counts every row.
        temperature: T of the formula, positive.
        kl_weight: w of the formula, 0 to 1. Below 1 it needs `labels`.
        num_items: N; None for the number of counted rows. With gradient accumulation, that of all micro-batches.

    Without any counted row the loss is 0. A class to which the teacher gives the logit −inf adds nothing.

    Raises:
        TypeError: logits that are not floating tensors, or are sharded; labels or numbers of another type.
        ValueError: shapes that differ; a temperature, a weight or, on a CPU, a label out of range.
    """
    check_loss(temperature, kl_weight, ignore_index)
    _check(student_logits, teacher_logits, labels, kl_weight)
    if num_items is not None and not isinstance(num_items, Tensor):
        check_number("num_items", num_items)
    vocabulary = student_logits.shape[-1]
    rows = student_logits.reshape(-1, vocabulary), teacher_logits.detach().reshape(-1, vocabulary)
    if labels is None:
        classes = torch.zeros(len(rows[0]), dtype=torch.int64, device=rows[0].device)
        counted = torch.ones_like(classes, dtype=torch.bool)
    else:
        classes = labels.reshape(-1)
        counted = classes != ignore_index
        _check_range(classes, counted, vocabulary, ignore_index)
        classes = torch.where(counted, classes, 0)
    if num_items is None:
        num_items = counted.sum().clamp(min=1)
    total: Tensor = _Distillation.apply(*rows, classes, counted, temperature, kl_weight)
    return total / num_items


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Σ over rows of KL(exp p ‖ exp q), float64 without dimensions. p, q: log-probabilities [N, V]. A class with the
    probability 0 in p adds nothing."""
    terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))
    return terms.sum(dtype=torch.float64)


def check_loss(temperature: float, kl_weight: float, ignore_index: int) -> None:
    """Raise TypeError or ValueError for options that `distillation_loss` does not take."""
    check_positive("temperature", temperature)
    if check_nonnegative("kl_weight", kl_weight) > 1:
        raise ValueError(f"kl_weight must be from 0 to 1, got {kl_weight!r}")
    if not is_whole(ignore_index):
        raise TypeError(f"ignore_index must be an int, got {ignore_index!r}")


def _check(student: Any, teacher: Any, labels: Any, kl_weight: float) -> None:
    for name, logits in (("student_logits", student), ("teacher_logits", teacher)):
        if not isinstance(logits, Tensor) or not logits.dtype.is_floating_point:
            kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"{name} must be a floating tensor [..., vocabulary], got {kind}")
        if is_dtensor(logits):
            raise TypeError(
                f"{name} is a DTensor placed as {logits.placements}; accepted: all classes of this rank's tokens as a "
                "plain tensor, logits.full_tensor()"
            )
    if student.ndim < 1 or student.shape != teacher.shape:
        raise ValueError(
            f"logits of the student {tuple(student.shape)} and of the teacher {tuple(teacher.shape)}; accepted: one "
            "shape [..., vocabulary]"
        )
    if labels is None and kl_weight < 1:
        raise ValueError(
            f"kl_weight={kl_weight} leaves a share to the cross-entropy, which needs labels; accepted: labels, or "
            "kl_weight=1.0"
        )
    if labels is not None and not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor of integers or None, got {type(labels).__name__}")
    if labels is not None and (labels.shape != student.shape[:-1] or labels.is_floating_point()):
        raise ValueError(
            f"labels of shape {tuple(labels.shape)}, {labels.dtype}, for logits {tuple(student.shape)}; accepted: "
            f"integers of shape {tuple(student.shape[:-1])}"
        )


def _check_range(classes: Tensor, counted: Tensor, vocabulary: int, ignore_index: int) -> None:
    """On a CPU only: elsewhere the question would wait for the device."""
    if not classes.is_cpu or torch.compiler.is_compiling():
        return
    wrong = classes[counted & ((classes < 0) | (classes >= vocabulary))]
    if wrong.numel():
        raise ValueError(
            f"label {int(wrong[0])} is not a class; accepted: 0 to {vocabulary - 1}, or ignore_index={ignore_index}"
        )


def _chunks(rows: int, vocabulary: int) -> Iterator[slice]:
    step = max(CHUNK_ELEMENTS // max(vocabulary, 1), 1)
    yield from (slice(start, start + step) for start in range(0, rows, step))


class _Distillation(torch.autograd.Function):
    """The sum over counted rows of the module's loss."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        classes: Tensor,
        counted: Tensor,
        temperature: float,
        kl_weight: float,
    ) -> Tensor:
        ctx.save_for_backward(student, teacher, classes, counted)
        ctx.temperature, ctx.kl_weight = temperature, kl_weight
        losses = torch.zeros(len(student), dtype=torch.float32, device=student.device)
        for at in _chunks(*student.shape):
            if kl_weight > 0:
                log_p = torch.log_softmax(teacher[at].float() / temperature, -1)
                log_q = torch.log_softmax(student[at].float() / temperature, -1)
                p = log_p.exp()
                terms = log_p.sub_(log_q).mul_(p).masked_fill_(p == 0, 0.0)
                losses[at] += kl_weight * temperature**2 * terms.sum(-1)
            if kl_weight < 1:
                found = F.cross_entropy(student[at].float(), classes[at], reduction="none")
                losses[at] += (1 - kl_weight) * found
        return torch.where(counted, losses, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, classes, counted = ctx.saved_tensors
        temperature, kl_weight = ctx.temperature, ctx.kl_weight
        grad = torch.empty_like(student)
        for at in _chunks(*student.shape):
            found = torch.zeros((), device=student.device)
            if kl_weight > 0:
                found = torch.softmax(student[at].float() / temperature, -1)
                found -= torch.softmax(teacher[at].float() / temperature, -1)
                found *= kl_weight * temperature
            if kl_weight < 1:
                q = torch.softmax(student[at].float(), -1)
                q.scatter_add_(1, classes[at, None], q.new_full((len(q), 1), -1.0))
                found = found + (1 - kl_weight) * q
            found *= grads[0]
            grad[at] = found.masked_fill_(~counted[at, None], 0.0)
        return grad, None, None, None, None, None
