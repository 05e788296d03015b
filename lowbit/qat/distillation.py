"""Distillation: QAT whose loss compares the quantized model with the high-precision one.

    teacher = copy.deepcopy(model)                        # before prepare_
    distill = qat.Distillation(model, teacher)
    loss = distill(input_ids=tokens, labels=tokens)       # in place of model(...).loss
    loss.backward()

Without another teacher, the model itself teaches, with fake quantization off. That takes no second copy of the weights
and no activations, only a forward pass and its logits. Where all weights train, such a teacher moves with the student
and holds it back (benchmarks/LOG.md). Where adapters of PEFT train, it is the frozen base without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowbit.convert import check_module
from lowbit.numerics.divergence import check_loss, distillation_loss
from lowbit.numerics.settings import check_flag, check_nonnegative
from lowbit.qat.switch import high_precision
from lowbit.tracing.batches import eval_mode


class Distillation:
    """A loss of a prepared model against a teacher: calling it runs the teacher, then the model, and gives the loss.

    The teacher runs under no_grad and in eval mode, without dropout. It leaves the random generators as they were, so
    the student's dropout draws are those of training without a teacher.

    Args:
        model: a model prepared by `lowbit.qat.prepare_`. Compiled, sharded by FSDP2 and wrapped ones work too.
        teacher: a module, or any callable with the model's arguments. None: the model itself with fake quantization
            off and, where PEFT has added adapters, without them.
        temperature, kl_weight, ignore_index: see `distillation_loss`. At the default `kl_weight` of 1 there is no
            cross-entropy, and labels only say which tokens count.
        hidden_weight: factor of a third term, the relative squared error of hidden states: the mean over layers of
            Σ (h − h_teacher)² / Σ h_teacher², over counted tokens. Outputs must have `hidden_states`, tensors
            [..., tokens, width]; models of transformers are asked for them by output_hidden_states=True.
        shift_labels: label i + 1 belongs to the logits at i, as transformers' causal models take labels. False: label i
            does.

    Raises:
        TypeError: `model` is not a module, `teacher` cannot be called, or an option is of another type.
        ValueError: a number out of range, or a teacher that is the model itself.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: Callable[..., Any] | None = None,
        *,
        temperature: float = 1.0,
        kl_weight: float = 1.0,
        hidden_weight: float = 0.0,
        shift_labels: bool = True,
        ignore_index: int = -100,
    ) -> None:
        check_module(model)
        if teacher is not None and not callable(teacher):
            raise TypeError(f"teacher must be a module, a function or None, got {teacher!r}")
        if teacher is model:
            raise ValueError(
                "the teacher is the prepared model itself, whose rounded outputs would teach themselves; leave it out, "
                "and the model teaches with fake quantization off, or give a copy made before prepare_"
            )
        check_loss(temperature, kl_weight, ignore_index)
        check_nonnegative("hidden_weight", hidden_weight)
        check_flag("shift_labels", shift_labels)
        self.model, self.teacher = model, teacher
        self.temperature, self.kl_weight = temperature, kl_weight
        self.hidden_weight, self.shift_labels = hidden_weight, shift_labels
        self.ignore_index = ignore_index

    def __call__(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        """The loss of one batch: a float32 scalar.

        Args:
            args, kwargs: those of the model. Where `attention_mask` is among them, padded tokens do not count.
            labels: [batch, tokens], integers; `ignore_index` excludes a token from all terms. None: every token counts.
                The model does not get them: it would compute its own loss, in float32.

        Raises ValueError and TypeError as `distillation_loss` does, and for outputs without logits.
        """
        return self.loss_and_outputs(self.model, args, labels, kwargs)[0]

    def loss_and_outputs(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        labels: Tensor | None,
        kwargs: dict[str, Any],
        num_items: Tensor | int | None = None,
    ) -> tuple[Tensor, Any]:
        """The loss, and the student's outputs.

        Args:
            model: the one to call, such as a wrapper of the prepared model.
            args, kwargs: of the call.
            labels: of the tokens, int64; None: all tokens count.
            num_items: by which the sum over tokens is divided; None: the tokens that count.
        """
        of_transformers = hasattr(getattr(self.model, "config", None), "output_hidden_states")
        if self.hidden_weight and of_transformers:
            kwargs = {**kwargs, "output_hidden_states": True}
        with _as_teacher(model, self.teacher) as teacher:
            taught = teacher(*args, **kwargs)
        outputs = model(*args, **kwargs)
        logits = _logits(outputs)
        counted = self._aligned(labels, kwargs.get("attention_mask"), logits)
        loss = distillation_loss(
            logits,
            _logits(taught),
            counted,
            temperature=self.temperature,
            kl_weight=self.kl_weight,
            ignore_index=self.ignore_index,
            num_items=num_items,
        )
        if self.hidden_weight:
            mask = None if counted is None else counted != self.ignore_index
            error = self.hidden_weight * _hidden_error(outputs, taught, mask)
            if num_items is not None and mask is not None:  # the share of this micro-batch
                error = error * mask.sum() / num_items
            loss = loss + error
        return loss, outputs

    def _aligned(self, labels: Tensor | None, mask: Any, logits: Tensor) -> Tensor | None:
        """The label of each row of logits, `ignore_index` where it is not counted."""
        if labels is None and self.kl_weight < 1:
            return None  # distillation_loss names the way out
        if labels is None:
            if not isinstance(mask, Tensor) or mask.shape != logits.shape[:-1]:
                return None
            return torch.where(mask.bool(), 0, self.ignore_index)
        if isinstance(mask, Tensor) and mask.shape == labels.shape:
            labels = torch.where(mask.bool(), labels, self.ignore_index)
        if self.shift_labels:
            labels = F.pad(labels, (0, 1), value=self.ignore_index)[..., 1:]
        return labels.to(logits.device)

    def attach(self, trainer: Any) -> None:
        """Make a Trainer of transformers, or a subclass, train with this loss; evaluation keeps its own.

            trainer = transformers.Trainer(model=model, ...)
            qat.Distillation(model).attach(trainer)

        The loss counts tokens over all micro-batches of a step, where the Trainer counts them.
        """
        own = trainer.compute_loss

        def compute_loss(
            model: nn.Module,
            inputs: dict[str, Any],
            return_outputs: bool = False,
            num_items_in_batch: Tensor | int | None = None,
        ) -> Any:
            if not model.training:
                return own(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
            given = {name: value for name, value in inputs.items() if name != "labels"}
            loss, outputs = self.loss_and_outputs(
                model, (), inputs.get("labels"), given, num_items_in_batch
            )
            if num_items_in_batch is not None and trainer.args.average_tokens_across_devices:
                # gradients are the mean of the processes, num_items_in_batch is their sum
                loss = loss * (trainer.accelerator.num_processes // trainer.get_tp_size())
            return (loss, outputs) if return_outputs else loss

        trainer.compute_loss = compute_loss


# ---- the teacher's forward pass ---------------------------------------------------------------------------------


@contextmanager
def _as_teacher(model: Any, teacher: Callable[..., Any] | None) -> Iterator[Callable[..., Any]]:
    """The function that computes the teacher's outputs, in the context in which it does."""
    runs = model if teacher is None else teacher
    with ExitStack() as stack:
        if teacher is None:
            stack.enter_context(high_precision(model))
            for module in model.modules():
                if hasattr(module, "peft_config") and hasattr(module, "disable_adapter"):
                    stack.enter_context(module.disable_adapter())
        if isinstance(runs, nn.Module):
            stack.enter_context(eval_mode(runs))
        stack.enter_context(torch.random.fork_rng(_devices(model, runs)))
        stack.enter_context(torch.no_grad())
        yield runs


def _devices(*models: Any) -> list[torch.device]:
    """The GPUs that have weights of these models. Their random generators are kept as they were."""
    parameters = (p for m in models if isinstance(m, nn.Module) for p in m.parameters())
    return list({p.device: None for p in parameters if p.is_cuda})


# ---- what models give out ----------------------------------------------------------------------------------------


def _logits(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"outputs of type {type(outputs).__name__} without logits; accepted: a tensor [..., vocabulary], or an "
            "object or dict with logits, as models of transformers give without return_dict=False"
        )
    return found


def _hidden_error(student: Any, teacher: Any, counted: Tensor | None) -> Tensor:
    """The mean over layers of the relative squared error of hidden states."""
    pairs = [getattr(outputs, "hidden_states", None) for outputs in (student, teacher)]
    if not pairs[0] or not pairs[1] or len(pairs[0]) != len(pairs[1]):
        counts = ["none" if not states else len(states) for states in pairs]
        raise ValueError(
            f"hidden_weight needs as many hidden_states of the student as of the teacher, got {counts[0]} and "
            f"{counts[1]}; accepted: outputs with hidden_states, or hidden_weight=0.0"
        )
    errors = []
    for own, other in zip(*pairs, strict=True):
        difference, size = (own - other).float().square(), other.float().square()
        if counted is not None:
            difference, size = (torch.where(counted[..., None], x, 0.0) for x in (difference, size))
        errors.append(difference.sum() / size.sum().clamp(min=torch.finfo(torch.float32).tiny))
    return torch.stack(errors).mean()
