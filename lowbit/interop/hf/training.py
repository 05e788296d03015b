"""Parts for the Trainer of transformers: lowbit's optimizers by name, and QAT as a callback."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from lowbit.convert import adapter_modules
from lowbit.interop import config_lines
from lowbit.qat.run import QATRun


def optimizer(
    name: str, args: TrainingArguments, **options: Any
) -> tuple[type[Any], dict[str, Any]]:
    """What `Trainer(optimizer_cls_and_kwargs=…)` takes, for an optimizer of lowbit.

        args = TrainingArguments("out", learning_rate=1e-4, weight_decay=0.1)
        Trainer(model, args, optimizer_cls_and_kwargs=lowbit.hf.optimizer("AdamW4bit", args), …)

    `TrainingArguments(optim=…)` takes only the names that transformers lists, hence this function. The learning rate,
    the betas and epsilon come from `args` if the optimizer has them. The Trainer forms the groups with and without
    weight decay.

    Args:
        name: a class of `lowbit.optim`, also with options, "AdamW8bit(bf16_stochastic_round=True)", or in the manner of
            transformers, "adamw_4bit_lowbit".
        args: the arguments of the Trainer.
        options: further options of the class; they win over those of `name` and `args`.

    Raises ValueError: an unknown name; an optimizer whose groups the Trainer cannot form; an option that the class does
    not have. TypeError: a name that is not a str, arguments without a learning rate.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"the name of an optimizer must be a str, such as 'AdamW8bit', got {name!r}"
        )
    if not hasattr(args, "learning_rate"):
        raise TypeError(
            "args must be the TrainingArguments, whose learning rate, betas and epsilon the optimizer takes, got "
            f"{type(args).__name__}"
        )
    kind, own = config_lines.optimizer(_class_named(name))
    known = inspect.signature(kind).parameters
    if "adamw_lr" in known:
        raise ValueError(
            f"{name} takes matrices and other parameters in groups of its own, which the Trainer does not form; pass "
            f"Trainer(optimizers=(lowbit.optim.{kind.__name__}(…), None))"
        )
    given: dict[str, Any] = {"lr": args.learning_rate, "eps": args.adam_epsilon}
    betas = (args.adam_beta1, args.adam_beta2)
    if "betas" in known:
        default = known["betas"].default
        given["betas"] = (*betas, *default[len(betas) :])
    chosen = {**{n: v for n, v in given.items() if n in known}, **own, **options}
    # The Trainer makes the optimizer after it loaded data and model; an error should come now.
    config_lines.check_options(name, kind, chosen)
    return kind, chosen


def _class_named(line: str) -> str:
    """The line with the name of a class in place of a name such as "adamw_4bit_lowbit"."""
    name, bracket, options = line.partition("(")
    key = name.strip().removesuffix("_lowbit").replace("_", "").lower()
    known = {n.lower(): n for n in config_lines.OPTIMIZERS}
    return known.get(key, name) + bracket + options


class QATCallback(QATRun, TrainerCallback):
    """Quantization-aware training by the Trainer: prepares the model, runs a schedule, converts at the end.

        callback = lowbit.hf.QATCallback(lowbit.Int4WeightOnly(32), start=100)
        Trainer(model, args, callbacks=[callback], …).train()       # model is in int4 afterwards
        lowbit.export(model, "model-int4", format="lowbit")

    The model is prepared when the Trainer is made, before the Trainer makes the optimizer. Checkpoints hold the plain
    weights that are trained, and a resumed training continues the schedule. The arguments are those of
    `lowbit.qat.run.QATRun`: `scheme`, `filter_fn`, `convert`, `start`, `freeze_observers` and further arguments of
    `prepare_`. `report` is that of `prepare_`, and after the end that of `convert_`.

    Warns at the end if the conversion merged all adapters of PEFT: the Trainer's `save_model` would write an adapter
    without tensors.

    Raises RuntimeError if the training begins with another model than the prepared one, such as that of `model_init=`.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.prepare(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the schedule to the step that a resumed training begins with."""
        if not self.prepared(kwargs["model"]):
            raise RuntimeError(
                "QATCallback prepared another model than the one that trains: give it in Trainer(callbacks=[…]), and "
                "the model by model= and not by model_init="
            )
        self.follow(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.follow(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        self.finish(model)
        if self.convert and hasattr(model, "peft_config") and not adapter_modules(model):
            warnings.warn(
                "the adapters are merged into the low-bit weights, so save_model and PeftModel.save_pretrained would "
                "write an adapter without tensors: write lowbit.export(model.merge_and_unload(), …) instead, or train "
                "by QATCallback(…, adapters='keep'), or with convert=False, which leave adapters to be saved",
                stacklevel=2,
            )
