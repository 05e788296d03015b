"""GGUF files of lowbit and of llama.cpp's own quantizer: losses of one model, in llama.cpp and in PyTorch.

    pip install llama-cpp-py-sync cffi
    python -m benchmarks.gguf_files RUN [--types Q4_K_M,Q2_K] [--windows 160] [--torch-windows 0] [--context 128]
        [--draws 3] [--batches 16] [--threads 1]
    python -m benchmarks.gguf_files MODEL --tokens TOKENS.pt …

RUN is the run folder of a seed of `recipes.recovery`. MODEL is a folder of transformers with a Llama whose inputs are
multiples of 256, and TOKENS a file of torch with the tensors "train" and "test".

Each file has the tensor types that llama.cpp's quantizer chooses. Its importance and lowbit's calibration see the same
batches of "train", on a GPU if there is one. llama.cpp computes the loss over windows of "test" on a CPU, and rounds
the inputs of its products to 8 bits; PyTorch computes that of the weights in the files, over windows of its own, with
the inputs as they are. Each loss is printed as nats above that of the float32 file, with the 95% interval of its mean
over the windows, and as nats above that of llama.cpp's own file.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import lowbit
from benchmarks.calibration_peers import hf_model
from lowbit.formats.gguf.file import GgufFile, GgufWriter, package
from lowbit.formats.gguf.llama import in_gguf
from lowbit.formats.module import ModelSource
from lowbit.inference import GPTQ, Search, Step
from lowbit.tensor.core.base import LowbitTensor
from recipes.calibration import open_run
from recipes.device import choose_device

FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13}
FILE_TYPES |= {"Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "Q2_K_S": 21}
"""llama.cpp's numbers."""


class LlamaCpp:
    """llama.cpp by the low-level interface of llama-cpp-py-sync."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        from llama_cpp_py_sync import _cffi_bindings as bindings

        self.ffi, self.lib = bindings.ffi, bindings.get_lib()
        self._silent = self.ffi.callback(
            "void(enum ggml_log_level, const char *, void *)", lambda *_: None
        )
        self.lib.llama_log_set(self._silent, self.ffi.NULL)
        self.lib.llama_backend_init()

    def quantize(
        self, source: Path, out: Path, kind: str, importance: Mapping[str, Tensor] | None
    ) -> None:
        """Write `out` by `llama_model_quantize`."""
        new, params = self.ffi.new, self.lib.llama_model_quantize_default_params()
        params.ftype, params.nthread = FILE_TYPES[kind], self.threads
        kept = []
        if importance:
            entries = new(f"struct llama_model_imatrix_data[{len(importance) + 1}]")
            for entry, (name, values) in zip(entries, importance.items(), strict=False):
                own, text = values.float().cpu().contiguous(), new("char[]", name.encode())
                kept += [own, text]
                entry.name, entry.size = text, own.numel()
                entry.data = self.ffi.cast("float *", own.data_ptr())
            params.imatrix = entries
        failed = self.lib.llama_model_quantize(
            str(source).encode(), str(out).encode(), new("llama_model_quantize_params *", params)
        )
        if failed:
            raise RuntimeError(f"llama_model_quantize of {kind} returned {failed}")

    def losses(self, path: Path, windows: Tensor) -> Tensor:
        """Mean nats a token of each window [W, T]: float64 [W]."""
        params = self.lib.llama_model_default_params()
        model = self.lib.llama_model_load_from_file(str(path).encode(), params)
        options = self.lib.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = windows.shape[1]
        options.n_threads = options.n_threads_batch = self.threads
        context = self.lib.llama_init_from_model(model, options)
        batch = self.lib.llama_batch_init(windows.shape[1], 0, 1)
        vocabulary = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(model))
        found = []
        for window in windows.tolist():
            self.lib.llama_memory_clear(self.lib.llama_get_memory(context), True)
            batch.n_tokens = len(window)
            for i, token in enumerate(window):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, 1
            if code := self.lib.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode returned {code}")
            size = len(window) * vocabulary
            buffer = self.ffi.buffer(self.lib.llama_get_logits(context), 4 * size)
            logits = torch.frombuffer(bytearray(buffer), dtype=torch.float32).view(-1, vocabulary)
            found.append(nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:])))
        self.lib.llama_free(context)
        self.lib.llama_model_free(model)
        return torch.stack(found).double()


def write_plain(model: nn.Module, path: Path, tokenizer: Path) -> None:
    """The model as a GGUF file in float32."""
    source = ModelSource(model, tokenizer)
    file = GgufWriter(path, source)
    for item in source.items():
        file.add({item.name: item.value}, item.name, None)
    file.finish()


def mean_squares(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """The mean square of each input of each linear, by the name of its weight in GGUF."""
    sums: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            own = inputs[0].detach().flatten(0, -2).square().sum(0)
            sums[name] = sums[name] + own if name in sums else own

        return hook

    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    hooks = [m.register_forward_pre_hook(watch(in_gguf(f"{n}.weight"))) for n, m in linears.items()]
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch)
    for hook in hooks:
        hook.remove()
    rows = sum(batch.numel() for batch in batches)
    return {name: t / rows for name, t in sums.items()}


def types_of(path: Path) -> dict[str, str]:
    """The type of each tensor of a file, by its name in transformers."""
    from lowbit.formats.gguf.llama import in_transformers

    return {in_transformers(t.name): t.tensor_type.name for t in package().GGUFReader(path).tensors}


def load(folder: Path) -> Any:
    import transformers

    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return found.eval().to(choose_device())


@torch.no_grad()
def torch_losses(folder: Path, path: Path, windows: Tensor) -> Tensor:
    """What `LlamaCpp.losses` gives, by PyTorch in float32 with the weights of a GGUF file."""
    model, file = load(folder), GgufFile(path)
    file.dtype = torch.float32
    for name, parameter in model.named_parameters():
        value = file.read(name)
        parameter.copy_(value.dequantize() if isinstance(value, LowbitTensor) else value)
    found = []
    for part in windows.split(8):
        ids = part.to(model.device)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.transpose(1, 2)
        losses = nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none")
        found.append(losses.double().mean(1).cpu())
    return torch.cat(found)


def files(
    engine: LlamaCpp,
    given: Any,
    kind: str,
    folder: Path,
    plain: Path,
    train: Tensor,
) -> Iterator[tuple[str, Path]]:
    """Write one file after another: the name of its method, and its path."""
    types: dict[str, str] = {}

    def theirs(name: str, importance: Mapping[str, Tensor] | None) -> tuple[str, Path]:
        path = folder / f"{kind} {name}.gguf"
        engine.quantize(plain, path, kind, importance)
        found = types_of(path)
        types.update(types or found)
        if found != types:
            print("types differ:", {k: (types[k], v) for k, v in found.items() if v != types[k]})
        return name, path

    def ours(name: str, steps: list[Step] | None, batches: list[Tensor]) -> tuple[str, Path]:
        model, path = load(given.model), folder / f"{kind} {name}.gguf"
        schemes = {
            name.removesuffix(".weight"): lowbit.formats.gguf_scheme(t)
            for name, t in types.items()
            if t != "F32"
        }
        if steps is None:
            lowbit.quantize_(model, schemes, scales="searched")
        else:
            lowbit.calibrate(model, schemes, batches, steps=steps, cache=None, held_out=[])
        lowbit.export(model.cpu(), path, "gguf", tokenizer=given.model)
        return name, path

    yield theirs("llama.cpp", None)
    for draw in range(given.draws):
        g, length = torch.Generator().manual_seed(draw), given.context
        batches = []
        for _ in range(given.batches):
            at = torch.randint(len(train) - length, (8,), generator=g)
            batches.append(torch.stack([train[i : i + length].long() for i in at.tolist()]))
        model = load(given.model)
        batches = [batch.to(model.device) for batch in batches]
        yield theirs(f"llama.cpp, importance {draw}", mean_squares(model, batches))
        for name, step in (("GPTQ()", GPTQ()), ("Search()", Search())):
            yield ours(f"lowbit, {name} {draw}", [step], batches)
    yield ours("lowbit, searched", None, [])


def of_run(run_folder: Path, folder: Path) -> dict[str, Tensor]:
    """Write the trained model of a run to `folder`, as one of transformers. Returns its tokens."""
    run = open_run(run_folder)
    hf_model(run).save_pretrained(folder)
    shutil.copy(run.folder.data / "tokenizer.json", folder)
    return {"train": run.data.train, "test": run.data.heldout}


def windows_of(tokens: Tensor, count: int, length: int) -> Tensor:
    """int64 [count, length], evenly spread over the text."""
    starts = torch.linspace(0, len(tokens) - length - 1, count).long()
    return torch.stack([tokens[i : i + length].long() for i in starts.tolist()])


def beside(losses: Tensor, others: Tensor) -> str:
    """The mean difference, with its 95% interval over windows."""
    difference = losses - others
    half = 1.96 * float(difference.std()) / len(difference) ** 0.5
    return f"{float(difference.mean()):+.5f} ± {half:.5f}"


class Compared:
    """Prints what each file loses by one program, beside the float32 file and llama.cpp's own of the same types."""

    def __init__(self, program: str, losses: Callable[[Path], Tensor], plain: Path) -> None:
        self.program, self.losses, self.high = program, losses, losses(plain)
        self.first: dict[str, Tensor] = {}
        count = f"{len(self.high)} windows"
        print(
            f"high precision in {program}: {float(self.high.mean()):.4f} nats, {count}", flush=True
        )

    def add(self, kind: str, name: str, path: Path) -> None:
        found = self.losses(path)
        first = self.first.setdefault(kind, found)
        more = "" if found is first else f"; less llama.cpp's {beside(found, first)}"
        print(f"{self.program}: {kind} {name}: {beside(found, self.high)}{more}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.gguf_files", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", type=Path)
    add("--tokens", type=Path)
    add("--types", default="Q4_K_M,Q2_K")
    add("--windows", type=int, default=160, help="that llama.cpp reads (%(default)s)")
    add("--torch-windows", type=int, default=0, help="that PyTorch reads (%(default)s)")
    add("--context", type=int, default=128, help="tokens of a window (%(default)s)")
    add("--threads", type=int, default=1, help="of llama.cpp (%(default)s)")
    add("--draws", type=int, default=3)
    add("--batches", type=int, default=16, help="of 8 windows, to calibrate (%(default)s)")
    given = parser.parse_args()
    engine = LlamaCpp(given.threads)
    with TemporaryDirectory() as name, ThreadPoolExecutor(1) as beside_the_gpu:
        folder = Path(name)
        if given.tokens:
            tokens = torch.load(given.tokens)
        else:
            tokens = of_run(given.model, folder / "model")
            given.model = folder / "model"
        test, more = (
            windows_of(tokens["test"], count, given.context)
            for count in (given.windows, max(given.torch_windows, 1))
        )
        plain = folder / "plain.gguf"
        write_plain(load(given.model).cpu(), plain, given.model)
        in_torch: Compared | None = None
        if given.torch_windows:
            in_torch = Compared(
                "PyTorch", lambda path: torch_losses(given.model, path, more), plain
            )
        made = beside_the_gpu.submit(
            Compared, "llama.cpp", lambda path: engine.losses(path, test), plain
        )
        waited = []
        for kind in given.types.split(","):
            for method, path in files(engine, given, kind, folder, plain, tokens["train"]):
                if in_torch:
                    in_torch.add(kind, method, path)
                waited.append(
                    beside_the_gpu.submit(
                        lambda *file: made.result().add(*file), kind, method, path
                    )
                )
        for each in waited:
            each.result()


if __name__ == "__main__":
    main()
