"""The commands by name, with their arguments and help. `lowbit.cli.arguments` explains the arguments.

No module that imports torch is imported before a command runs, so that help and errors about arguments come at once.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Annotated, Any

import typer

import lowbit
from lowbit.cli import arguments as of
from lowbit.cli.errors import INTERRUPTED, MISUSED

app = typer.Typer(
    name="lowbit",
    rich_markup_mode=None,  # rich would wrap the examples of the help
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _command(
    module: str, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a command: the signature and the help of a function of this name in a module of `lowbit.cli`.

    The command imports all of lowbit, and calls that function. `name`: of the command, if it is another one.
    """

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            lowbit.give_out_names()
            getattr(importlib.import_module(f"lowbit.cli.{module}"), function.__name__)(**given)

        short, _, _ = (function.__doc__ or "").partition("\n")  # the list would cut it off
        return app.command(name or function.__name__, short_help=short)(run)

    return enter


def _print_version(value: bool) -> None:
    if value:
        typer.echo(lowbit.__version__)
        raise typer.Exit


@app.callback()
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; also after a command.")
    ] = False,
) -> None:
    """Quantize, convert, measure and run models in 8 bits and fewer."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(MISUSED)  # a script whose command is empty has to notice


@_command("convert")
def quantize(
    model: of.Model,
    out: of.Out,
    scheme: of.SchemeName = "int4",
    group_size: of.GroupSize = None,
    layers: of.Layers = None,
    plan: of.PlanFile = None,
    format: of.FormatOfFolder = None,
    scales: of.Scales = None,
    lossy: of.Lossy = False,
    overwrite: of.Overwrite = False,
    max_shard_size: of.ShardSize = "500MB",
    method: of.Methods = None,
    data: of.CalibrationData = None,
    context: of.Context = None,
    limit: of.CalibrationLimit = None,
    batch: of.CalibrationBatch = None,
    kv_cache: of.KVCache = None,
    device: of.Device = "cpu",
    json: of.Json = False,
) -> None:
    """Quantize a folder of plain weights, layer by layer, into a folder that vLLM and transformers take.

    The model is never whole in memory. With --data the weights are calibrated on that text by --method, one block after
    another, which needs the extra hf. A command that was killed goes on from there. --data sampled takes tokens that
    the model draws, for which it is whole in memory at first. With --method alone weights are calibrated without data,
    and the model is whole in memory. Embeddings, the output head and routers stay in high precision unless --layers or
    a mix names them.

    \b
    Examples:
      lowbit quantize model --scheme int4 --group-size 128 --out model-int4
      lowbit quantize model --scheme int8 --format lowbit --out model-int8 --json
      lowbit quantize model --layers lm_head=int8 --layers '*.0.*=none' --out model-mixed
      lowbit quantize model --plan plan.json --out model-planned
      lowbit quantize model --scheme int4 --method awq,gptq --data text.txt --out model-awq
      lowbit quantize model --scheme nvfp4 --data sampled --out model-nvfp4
      lowbit quantize model --scheme int8_int8_static --data text.txt --out model-static
      lowbit quantize model --scheme float8_float8 --method none --data text.txt --kv-cache float8 --out model-fp8
      lowbit quantize model --scheme Q4_K_M --format gguf --data text.txt --out model.gguf
    """


@_command("convert")
def export(
    model: of.Model,
    out: of.Out,
    format: of.Format,
    scheme: of.OnTheWay = None,
    group_size: of.GroupSize = None,
    lossy: of.Lossy = False,
    overwrite: of.Overwrite = False,
    max_shard_size: of.ShardSize = "500MB",
    json: of.Json = False,
) -> None:
    """Write a model in low bits in another format, with the same values to the bit.

    \b
    Examples:
      lowbit export model-int4 --format lowbit --out model-lowbit
      lowbit export model-int4 --format gptq --lossy --out model-gptq
      lowbit export model --scheme int8 --format compressed-tensors --out model-int8
    """


@_command("inspect")
def inspect(model: of.Model, against: of.Against = None, json: of.Json = False) -> None:
    """Show the schemes, the sizes and, against the original, the signal-to-noise ratio of each weight.

    \b
    Examples:
      lowbit inspect model-int4
      lowbit inspect model-int4 --against model
      lowbit inspect model-int4 --against model --json
    """


@_command("evaluate", "eval")
def evaluate(
    models: of.Models,
    data: of.Text,
    against: of.Against = None,
    context: of.Context = None,
    limit: of.Limit = None,
    by_layer: of.ByLayer = False,
    tasks: of.Tasks = "",
    examples: of.Examples = None,
    device: of.Device = "cpu",
    json: of.Json = False,
    picture: of.Picture = None,
) -> None:
    """Perplexity on a text and, against the original, KL divergence and top-1 agreement. Needs the extra hf.

    Several models are loaded one after another, beside the original.

    \b
    Examples:
      lowbit eval model-int4 --data text.txt
      lowbit eval model-int4 --data text.txt --against model --by-layer --picture eval.png
      lowbit eval model-int4 --data text.txt --against model --context 64 --limit 256 --json
    """


@_command("generate")
def generate(
    model: of.Model,
    prompt: of.Prompt,
    max_new_tokens: of.NewTokens = 128,
    temperature: of.Temperature = 0.0,
    seed: of.Seed = 0,
    device: of.Device = "cpu",
    json: of.Json = False,
) -> None:
    """Continue a prompt with a model in low bits, or a plain one. Needs the extra hf.

    \b
    Examples:
      lowbit generate model-int4 --prompt "the model" --max-new-tokens 8
      lowbit generate model-int4 --prompt "the model" --max-new-tokens 8 --temperature 0.7 --json
    """


@_command("estimate")
def estimate(
    config: of.Config,
    batch: of.Batch = 1,
    sequence: of.Sequence = 2048,
    recompute: of.Recompute = False,
    compiled: of.Compiled = False,
    json: of.Json = False,
) -> None:
    """Bytes of weights, gradients, states and activations under each choice, and the smallest GPU that holds them.

    Weights, gradients and states are counted exactly. Activations are a formula, and all parts are added, so a step
    takes less. A config.json alone needs the extra hf.

    \b
    Examples:
      lowbit estimate model
      lowbit estimate model/config.json --batch 4 --sequence 4096 --recompute --json
    """


@_command("bench")
def bench(
    device: of.AnyDevice = None,
    quick: of.Quick = False,
    json: of.Json = False,
) -> None:
    """Measure this machine: optimizer steps and linears in low bits beside PyTorch's.

    \b
    Examples:
      lowbit bench --quick
      lowbit bench --quick --device cpu --json
    """


@_command("doctor")
def doctor(json: of.Json = False) -> None:
    """Say which kernels, compilers, GPUs and extras this machine can use, and why not.

    \b
    Examples:
      lowbit doctor
      lowbit doctor --json
    """


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code. Raises what the command and the parser raise.

    typer turns an interruption into `Abort`, or, in later releases, into an exit code.
    """
    command: Any = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="lowbit", standalone_mode=False)
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0
