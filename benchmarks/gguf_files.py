"""GGUF files of lowbit and of llama.cpp's own quantizer: losses of one model in llama.cpp, and errors of weights.

    pip install llama-cpp-py-sync cffi
    python -m benchmarks.gguf_files MODEL --tokens TOKENS.pt [--types Q4_K_M,Q2_K] [--windows 160] [--draws 3]

MODEL is a folder of transformers with a Llama whose inputs are multiples of 256, and TOKENS a file of torch with the
tensors "train" and "test". Each file has the tensor types that llama.cpp's quantizer chooses. Its importance and
lowbit's calibration see the same batches of "train". llama.cpp computes the loss over windows of "test", and rounds
the inputs of its products to 8 bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import lowbit
from lowbit.formats.gguf.file import GgufWriter, package
from lowbit.formats.gguf.llama import in_gguf
from lowbit.formats.module import ModelSource
from lowbit.inference import GPTQ, Search, Step

CONTEXT = 128
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13}
FILE_TYPES |= {"Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "Q2_K_S": 21}
"""llama.cpp's numbers."""


class LlamaCpp:
    """llama.cpp by the low-level interface of llama-cpp-py-sync."""

    def __init__(self) -> None:
        from llama_cpp_py_sync import _cffi_bindings as bindings

        self.ffi, self.lib = bindings.ffi, bindings.get_lib()
        self._silent = self.ffi.callback(
            "void(enum ggml_log_level, const char *, void *)", lambda *_: None
        )
        self.lib.llama_log_set(self._silent, self.ffi.NULL)
        self.lib.llama_backend_init()

    def quantize(
        self, source: Path, out: Path, kind: str, importance: Mapping[str, Tensor] | None
    ) -> float:
        """Write `out` by `llama_model_quantize`. Returns seconds."""
        new, params = self.ffi.new, self.lib.llama_model_quantize_default_params()
        params.ftype, params.nthread = FILE_TYPES[kind], 1
        kept = []
        if importance:
            entries = new(f"struct llama_model_imatrix_data[{len(importance) + 1}]")
            for entry, (name, values) in zip(entries, importance.items(), strict=False):
                own, text = values.float().contiguous(), new("char[]", name.encode())
                kept += [own, text]
                entry.name, entry.size = text, own.numel()
                entry.data = self.ffi.cast("float *", own.data_ptr())
            params.imatrix = entries
        begin = time.process_time()
        failed = self.lib.llama_model_quantize(
            str(source).encode(), str(out).encode(), new("llama_model_quantize_params *", params)
        )
        if failed:
            raise RuntimeError(f"llama_model_quantize of {kind} returned {failed}")
        return time.process_time() - begin

    def loss(self, path: Path, windows: Tensor) -> float:
        """Mean nats a token over windows [W, CONTEXT]."""
        params = self.lib.llama_model_default_params()
        model = self.lib.llama_model_load_from_file(str(path).encode(), params)
        options = self.lib.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = CONTEXT
        options.n_threads = options.n_threads_batch = 1
        context = self.lib.llama_init_from_model(model, options)
        batch = self.lib.llama_batch_init(CONTEXT, 0, 1)
        vocabulary = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(model))
        total = 0.0
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
            total += float(nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:])))
        self.lib.llama_free(context)
        self.lib.llama_model_free(model)
        return total / len(windows)


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


def load(folder: Path) -> nn.Module:
    import transformers

    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return found.eval()


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.gguf_files", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--types", default="Q4_K_M,Q2_K")
    parser.add_argument("--windows", type=int, default=160)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--batches", type=int, default=16)
    given = parser.parse_args()
    tokens = torch.load(given.tokens)
    ends = torch.linspace(0, len(tokens["test"]) - CONTEXT - 1, given.windows).long()
    test = torch.stack([tokens["test"][i : i + CONTEXT].long() for i in ends.tolist()])
    engine, model = LlamaCpp(), load(given.model)
    with TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.gguf"
        write_plain(model, plain, given.model)
        high = engine.loss(plain, test)
        print(f"high precision: {high:.4f} nats, {given.windows} windows of {CONTEXT} tokens")
        for kind in given.types.split(","):
            for name, found in compare(
                engine, given, kind, Path(folder), plain, tokens, test
            ).items():
                print(f"{kind} {name}: {found - high:+.4f}", flush=True)


def compare(
    engine: LlamaCpp,
    given: Any,
    kind: str,
    folder: Path,
    plain: Path,
    tokens: dict[str, Tensor],
    test: Tensor,
) -> dict[str, float]:
    """Losses in llama.cpp by name of the method."""
    found: dict[str, float] = {}
    theirs, ours = folder / "theirs.gguf", folder / "ours.gguf"

    def write(steps: list[Step] | None, batches: list[Tensor]) -> float:
        model = load(given.model)
        schemes = {
            name.removesuffix(".weight"): lowbit.formats.gguf_scheme(t)
            for name, t in types.items()
            if t != "F32"
        }
        if steps is None:
            lowbit.quantize_(model, schemes, scales="searched")
        else:
            lowbit.calibrate(model, schemes, batches, steps=steps, held_out=[])
        lowbit.export(model, ours, "gguf", tokenizer=given.model, overwrite=ours.exists())
        return engine.loss(ours, test)

    engine.quantize(plain, theirs, kind, None)
    types = types_of(theirs)
    found["llama.cpp"] = engine.loss(theirs, test)
    found["lowbit, searched"] = write(None, [])
    for draw in range(given.draws):
        g = torch.Generator().manual_seed(draw)
        train = tokens["train"]
        batches = []
        for _ in range(given.batches):
            at = torch.randint(len(train) - CONTEXT, (8,), generator=g)
            batches.append(torch.stack([train[i : i + CONTEXT].long() for i in at.tolist()]))
        importance = mean_squares(load(given.model), batches)
        engine.quantize(plain, theirs, kind, importance)
        if types_of(theirs) != types:
            print(
                "types differ:",
                {k: (types[k], v) for k, v in types_of(theirs).items() if v != types[k]},
            )
        found[f"llama.cpp, importance {draw}"] = engine.loss(theirs, test)
        for name, step in (("Search()", Search()), ("GPTQ()", GPTQ())):
            found[f"lowbit, {name} {draw}"] = write([step], batches)
    return found


if __name__ == "__main__":
    main()
