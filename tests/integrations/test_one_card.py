"""The recipe for one card: its loss against float64, its clipping, and runs of seconds that resume to the same bits."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import lowbit
from recipes import one_card, text
from recipes.chunked_loss import ChunkedCrossEntropy
from recipes.graphed_step import GraphedStep, way_out
from recipes.one_card import ClipByHistory, Config, main, prepared_model
from tests.forked import Program

SETTINGS = ["steps=6", "context=64", "batch_size=4", "lr=4e-3", "warmup_steps=2", "save_every=3"]
CPU = torch.device("cpu")


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.detach().double() - exact.double()).norm() / exact.double().norm())


KINDS = ["float32", "bfloat16", "int8", "int4"]


@pytest.mark.parametrize(
    ("kind", "rows", "compiled"),
    [*((kind, rows, False) for kind in KINDS for rows in (7, 33, 100)), ("bfloat16", 33, True)],
)
def test_the_loss_without_all_logits(
    kind: str, rows: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled:  # Inductor takes 18 s here
        fused = partial(torch.compile, backend="aot_eager")
        monkeypatch.setattr("recipes.chunked_loss._fused", fused)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = nn.Sequential(nn.Linear(64, 100, bias=False)).to(dtype)
    if kind in one_card.SCHEMES:
        lowbit.train.prepare_(model, one_card.SCHEMES[kind])
    weight = model[0].weight
    values = weight.dequantize() if isinstance(weight, lowbit.LowbitTensor) else weight
    x = (torch.randn(17, 64) * 4).to(dtype).requires_grad_()
    targets = torch.cat([torch.tensor([0, 99, 6, 7]), torch.randint(100, (13,))])
    loss: Any = ChunkedCrossEntropy.apply(x, weight, targets, rows, compiled)
    (loss * 3).backward()
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, values))
    exact = F.cross_entropy(exact_x @ exact_w.t(), targets)
    (exact * 3).backward()
    assert x.grad is not None and exact_x.grad is not None and exact_w.grad is not None
    bound = 1e-2 if kind == "bfloat16" else 1e-5
    assert abs(loss.item() - exact.item()) <= bound * exact.item()
    assert relative(x.grad, exact_x.grad) < bound and relative(weight.grad, exact_w.grad) < bound
    with torch.no_grad():
        x[3, 5] = torch.nan
    assert ChunkedCrossEntropy.apply(x, weight, targets, rows, compiled).isnan()  # type: ignore[union-attr]


def test_clipping_by_history() -> None:
    """A gradient of 0, 100 of norm 1, then one of 50: the step takes 3 of the last one, and the others whole."""
    param, other = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = lowbit.optim.SGD([param, other], lr=1.0)
    clipping = ClipByHistory(optimizer, 3.0, CPU)
    lowbit.optim.step_in_backward(optimizer, bucket_mib=clipping.BUCKET)

    def stepped(factor: float) -> Tensor:
        before, others = param.detach().clone(), other.detach().clone()
        (param @ torch.full((4,), 0.5) * factor + other.sum()).backward()
        torch.testing.assert_close(others - other, torch.ones(4))
        return (before - param).norm().detach()

    assert stepped(0.0) == 0 and clipping.norms[0] == 0
    for _ in range(100):
        torch.testing.assert_close(stepped(1.0), torch.tensor(1.0), rtol=1e-4, atol=0)
    torch.testing.assert_close(stepped(50.0), torch.tensor(3.0), rtol=1e-4, atol=0)
    assert clipping.norms[0] == pytest.approx(1.04)
    before = clipping.norms.clone()
    assert stepped(math.nan).isnan() and torch.equal(clipping.norms[0], before[0])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"The square of {i} is {i * i}.\n" for i in range(1500)))
    return path


def command(source: Path, out: Path | None, *more: str) -> list[str]:
    line = ["--model", "tiny", "--data", str(source)]
    line += ["--measure"] if out is None else ["--out", str(out)]
    return [*line, *(word for assignment in (*SETTINGS, *more) for word in ("--set", assignment))]


def losses(printed: str) -> list[float]:
    return [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step")]


KILLED = """
import os, signal, sys
from recipes import one_card
save = one_card.save_checkpoint
def killed(path, content):
    save(path, content)
    os.kill(os.getpid(), signal.SIGKILL)
one_card.save_checkpoint = killed
one_card.main(sys.argv[1:])
"""


def test_a_run_that_is_cut_resumes_to_the_same_bits(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert main(command(source, tmp_path / "whole")) == 0
    whole = losses(capsys.readouterr().out)
    assert len(whole) == 6 and whole[0] == pytest.approx(math.log(300), rel=0.02)
    assert whole[-1] < 0.85 * whole[0]

    save = one_card.save_checkpoint

    def cut(path: Path, content: Any) -> None:
        save(path, content)
        raise KeyboardInterrupt

    monkeypatch.setattr(one_card, "save_checkpoint", cut)
    assert main(command(source, tmp_path / "cut")) == 130
    monkeypatch.undo()
    capsys.readouterr()
    assert main(command(source, tmp_path / "cut")) == 0
    printed = capsys.readouterr().out
    assert "resumed after step 3" in printed and losses(printed) == whole[3:]
    killed = Program(KILLED, *command(source, tmp_path / "killed"), folder=Path.cwd())
    assert killed.finished().returncode == -signal.SIGKILL
    assert main(command(source, tmp_path / "killed")) == 0
    printed = capsys.readouterr().out
    assert "resumed after step 3" in printed and losses(printed) == whole[3:]
    names = ("whole", "cut", "killed")
    ends = [one_card.load_checkpoint(tmp_path / n / "checkpoint.pt") for n in names]
    for name, value in ends[0]["model"].items():
        for other in (ends[1]["model"][name], ends[2]["model"][name]):
            assert type(value) is type(other)
            assert torch.equal(*(getattr(t, "codes", t) for t in (value, other))), name
    from safetensors.torch import load_file

    files = [load_file(tmp_path / n / "model" / "model.safetensors") for n in ("whole", "cut")]
    assert files[0].keys() == files[1].keys() and "lm_head.weight" in files[0]
    assert all(torch.equal(files[0][n], files[1][n]) for n in files[0])

    del ends[1]["config"]["compiled"]  # as in checkpoints from before this setting
    save(tmp_path / "cut" / "checkpoint.pt", ends[1])
    assert main(command(source, tmp_path / "cut", "compiled=False", "graph=False")) == 0
    assert "resumed after step 6" in capsys.readouterr().out
    assert main(command(source, tmp_path / "cut", "lr=1e-3")) == 2
    assert "was trained with lr=0.004, not 0.001" in capsys.readouterr().err
    other = tmp_path / "other.txt"
    other.write_text(source.read_text() + "Another end.\n" * 100)
    assert main(command(other, tmp_path / "cut")) == 2
    assert "was trained from another --data" in capsys.readouterr().err
    assert main([*command(source, tmp_path / "y"), "--model", str(tmp_path / "cut" / "model")]) == 2
    assert "its tokenizer can't be loaded" in capsys.readouterr().err


def test_dropout_that_is_no_module_is_drawn_again() -> None:
    """OPT calls a function for its dropout. The gradients of its checkpoints are those of the masks of the loss."""
    from transformers import AutoModelForCausalLM, OPTConfig

    small = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape = OPTConfig(**small, word_embed_proj_dim=32, vocab_size=100, dropout=0.3)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape).train()
    tokens = torch.randint(4, 100, (33,))
    state = torch.get_rng_state()
    assert one_card.first_pass(model, tokens, Config())[1]
    assert torch.equal(torch.get_rng_state(), state)
    assert not one_card.first_pass(model.eval(), tokens, Config())[1]

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        model.train().zero_grad()
        one_card.train_step(model, tokens[None, :-1], tokens[None, 1:], Config())
        return [p.grad for p in model.parameters() if p.grad is not None]

    exact = gradients()
    one_card.checkpoint_blocks(model, draws=True)
    assert all(relative(a, b) < 2e-2 for a, b in zip(gradients(), exact, strict=True))


def test_compiled_blocks_share_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five blocks make one graph of the forward pass and one of the checkpoint's, and train as they do without."""
    from torch._dynamo.utils import counters

    traced = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setitem(one_card.SHAPES["tiny"], "num_hidden_layers", 5)
    ends = []
    for compiled in (False, True):
        torch.compiler.reset()
        counters.clear()
        config = Config(lr=4e-3)
        model = prepared_model("tiny", config, CPU)
        one_card.checkpoint_blocks(model, draws=False, compiled=compiled)
        optimizer = one_card.make_optimizer(list(model.parameters()), config)
        lowbit.optim.step_in_backward(optimizer)
        tokens = torch.randint(300, (4, 2, 65), generator=torch.Generator().manual_seed(0))
        steps = [one_card.train_step(model, t[:, :-1], t[:, 1:], config) for t in tokens]
        ends.append(torch.stack(steps))
        assert counters["stats"]["unique_graphs"] == (2 if compiled else 0)
    assert relative(ends[1], ends[0]) < 1e-2 and (ends[0].diff().abs() > 1e-4).all()
    with pytest.raises(one_card.UserError, match="Linear has no block that transformers can"):
        one_card.checkpoint_blocks(nn.Linear(2, 2), draws=False)


@pytest.mark.parametrize(
    "window, own, why",
    [
        (None, "sdpa", ""),
        (128, "sdpa", ""),
        (32, "sdpa", "65 tokens have other hidden states without,"),
        (None, "eager", "its implementation is eager, and sdpa alone"),
    ],
)
def test_masks_are_left_out_where_attention_is_causal_and_no_more(
    window: int | None, own: str, why: str, capsys: Any
) -> None:
    from transformers import AutoModelForCausalLM, MistralConfig

    torch.manual_seed(0)
    shape = MistralConfig(**one_card.SHAPES["tiny"], sliding_window=window)
    model = AutoModelForCausalLM.from_config(shape, attn_implementation=own).train()
    tokens = torch.randint(300, (65,))
    with torch.no_grad():
        before = model(input_ids=tokens[None]).logits
        hidden, draws = one_card.first_pass(model, tokens, Config())
        one_card.leave_out_masks(model, tokens, hidden)
        assert torch.equal(model(input_ids=tokens[None]).logits, before) and not draws
    assert model.config._attn_implementation == (own if why else one_card.WITHOUT_MASKS)
    assert model.training and one_card.WITHOUT_MASKS not in model.config.to_json_string()
    printed = capsys.readouterr().out
    said = f"attention keeps its masks, which take time: {why}" if why else "runs without masks"
    assert said in printed and printed.count("\n") == 1


def test_the_first_pass_is_one_pass_with_few_logits() -> None:
    """Over the whole context, with logits of the first tokens alone, and without an effect on later passes."""
    model = prepared_model("tiny", Config(), CPU)
    tokens, rows = torch.randint(300, (200,)), []
    base, head = model.base_model, model.get_output_embeddings()
    counting = [
        m.register_forward_hook(lambda m, i, y: rows.append(y[0].shape)) for m in (base, head)
    ]
    hidden, draws = one_card.first_pass(model, tokens, Config())
    assert rows == [(1, 200, 64), (one_card.LOOKED_AT, 300)] and not draws
    for hook in counting:
        hook.remove()
    with torch.no_grad():
        assert torch.equal(base(input_ids=tokens[None])[0], hidden)
        assert model(input_ids=tokens[None]).logits.shape == (1, 200, 300)


@pytest.mark.parametrize("kind", ["Granite", "Gemma2", "Phi"])
def test_a_head_that_does_more_than_multiply_is_refused(kind: str) -> None:
    """It scales or caps its logits, or has a bias."""
    import transformers

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100}
    more = {"Granite": {"logits_scaling": 8.0}, "Gemma2": {"final_logit_softcapping": 0.5}}
    shape = getattr(transformers, f"{kind}Config")(
        **small, **more.get(kind, {}), num_attention_heads=2, num_key_value_heads=2, head_dim=16
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(shape)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
        if kind == "Phi":
            model.get_output_embeddings().bias.normal_()
    with pytest.raises(one_card.UserError, match="the model's own loss is"):
        one_card.first_pass(model.train(), torch.randint(100, (40,)), Config())


def test_weights_with_nan_are_refused_by_name() -> None:
    model = prepared_model("tiny", Config(), CPU)
    with torch.no_grad():
        model.base_model.norm.weight[3] = math.nan
    with pytest.raises(one_card.UserError, match="as it was loaded is nan: its weights have NaN"):
        one_card.first_pass(model, torch.arange(40), Config())


def test_what_a_models_tables_do_not_hold_is_refused() -> None:
    """Learned positions and embeddings, the last entry of which is accepted."""
    from transformers import AutoModelForCausalLM, GPT2Config

    shape = GPT2Config(n_positions=32, n_embd=32, n_layer=1, n_head=2, vocab_size=100)
    model = AutoModelForCausalLM.from_config(shape)
    one_card.check_reach(model, torch.tensor([0, 99]), Config(context=32))
    with pytest.raises(one_card.UserError, match=r"context is 33; accepted: up to 32, .*=32"):
        one_card.check_reach(model, torch.tensor([0, 99]), Config(context=33))
    with pytest.raises(one_card.UserError, match=r"gives token 100, .* embeddings of 100 tokens"):
        one_card.check_reach(model, torch.tensor([0, 100]), Config(context=32))


def test_a_folder_with_a_tied_head_in_int4_with_int8_products(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    """Errors of rounding go into the momentum. The written model is the trained one: its loss is lower."""
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    folder, out = tmp_path / "published", tmp_path / "run"
    torch.manual_seed(0)
    shape = LlamaConfig(**one_card.SHAPES["tiny"], tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    made = text.train_tokenizer([source.read_text()], 300)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=text.END).save_pretrained(folder)
    more = ("weights=int4", "int8_products=True", "correction=momentum", "state=8bit")
    assert main([*command(source, out, *more), "--model", str(folder)]) == 0
    found = losses(capsys.readouterr().out)
    assert found[-1] < 0.85 * found[0]
    written = AutoModelForCausalLM.from_pretrained(out / "model")
    assert written.dtype is torch.bfloat16
    assert written.lm_head.weight is written.model.embed_tokens.weight
    tokens = one_card.tokens_of(str(out / "model"), source)[:512].long().view(8, 64)
    with torch.no_grad():
        assert written(input_ids=tokens, labels=tokens).loss < 0.9 * found[0]


def test_what_a_step_keeps() -> None:
    """All matrices are int8, a backward keeps codes of each block's input, and at most one bucket of gradients."""
    model = prepared_model("tiny", Config(), CPU)
    one_card.checkpoint_blocks(model, draws=False)
    kinds = {n for n, p in model.named_parameters() if type(p) is nn.Parameter}
    assert all("norm" in name for name in kinds) and len(kinds) == 5
    assert isinstance(model.get_input_embeddings().weight, lowbit.Int8WeightTensor)
    context = lowbit.train.save_in_int8(model, min_numel=1)
    made = []
    pack = context.pack_hook

    def counting(t: Tensor) -> Any:
        saved = pack(t)
        made.extend([saved[0]] if not isinstance(saved[0], Tensor) else [])
        return saved

    context.pack_hook = counting
    tokens = torch.randint(300, (2, 64))
    with context:
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    blocks = {id(codes) for codes in made if codes.count == 2 * 64 * 64}
    assert len(blocks) in (4, 5) and len(made) < 12  # two boundaries, and what the last norm keeps
    optimizer = lowbit.optim.AdamW4bit(model.parameters(), lr=1e-3)
    lowbit.optim.step_in_backward(optimizer, bucket_mib=1e-6)
    alive: list[int] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
        )
    head = model.get_output_embeddings().weight
    loss: Any = ChunkedCrossEntropy.apply(hidden.flatten(0, 1), head, tokens.flatten(), 128)
    loss.backward()
    assert len(alive) == 21 and max(alive) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "weights=int3"], "weights is int3; accepted: int8 or int4"),
        (["--set", "lr=0"], "lr is 0; accepted: finite and above 0"),
        (["--set", "context=1"], "context is 1; accepted: at least 2"),
        (["--set", "context=90000"], "tokens are too few for sequences of 90000; give --data more"),
        (["--set", "model.dim=3"], "with NAME one of steps, "),
        (["--model", "9b"], "--model 9b: accepted: a folder with config.json, or"),
        (["--set", "memory_gib=8"], "memory_gib=8 limits a GPU; leave it out on a CPU"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, source: Path, tmp_path: Path, capsys: Any
) -> None:
    assert (
        main(["--model", "tiny", "--data", str(source), "--out", str(tmp_path / "x"), *arguments])
        == 2
    )
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_context_that_is_too_long_gets_the_longest(
    source: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main(command(source, tmp_path / "x", "context=90000")) == 2
    longest = int(capsys.readouterr().err.rpartition("--set context=")[2])
    assert longest < 90000
    assert 2 * (longest + 1) <= len(one_card.tokens_of("tiny", source)) < 2 * (longest + 2)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("products", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("weights", one_card.SCHEMES)
def test_a_replayed_graph_trains_as_the_step_does(
    weights: str, products: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps, four of them replayed, have the losses of six that the host launches. Rates and batches change. The
    captured step needs no mask, so it compiles nothing."""
    if products:  # of layers that would gain nothing too
        on = dict.fromkeys(("output", "grad_input", "grad_weight", "always"), True)
        scheme = replace(one_card.SCHEMES[weights], **on)
        monkeypatch.setitem(one_card.SCHEMES, weights, scheme)
    ends = []
    for graph in (False, True):
        config = Config(
            steps=6, batch_size=2, context=64, lr=4e-3, warmup_steps=2, graph=graph, weights=weights
        )
        model = prepared_model("tiny", config, torch.device("cuda"))
        tokens = torch.arange(64, device="cuda")
        one_card.leave_out_masks(model, tokens, one_card.first_pass(model, tokens, config)[0])
        assert model.config._attn_implementation == one_card.WITHOUT_MASKS
        one_card.checkpoint_blocks(model, draws=False, compiled=compiled)
        params = list(model.parameters())
        optimizer = one_card.make_optimizer(params, config)
        clipping = ClipByHistory(optimizer, config.clip, torch.device("cuda"))
        lowbit.optim.step_in_backward(optimizer, bucket_mib=clipping.BUCKET)
        run: Any = partial(one_card.train_step, model, config=config)
        run = GraphedStep(run) if graph else run
        losses = []
        for step in range(config.steps):
            one_card.set_rate(optimizer, config.rate(step), graph)
            made = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 300, (2, 65), generator=made).cuda()
            batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            losses.append(run(*batch).item())
        ends.append(torch.tensor(losses))
    assert relative(ends[1], ends[0]) < 1e-2 and (ends[0].diff().abs() > 1e-4).all()


@pytest.mark.parametrize(
    "kind, sizes, message",
    [
        ("Llama", {"max_position_embeddings": 32}, "context is 64; accepted: up to 32"),
        ("Llama", {"vocab_size": 90}, "but the model has embeddings of 90 tokens"),
        (
            "CTRL",
            {"n_embd": 32, "dff": 32, "n_layer": 1, "n_head": 2},
            "no block that transformers",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_model_is_loaded(
    kind: str, sizes: dict[str, int], message: str, source: Path, tmp_path: Path, capsys: Any
) -> None:
    import transformers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "published"  # it has no weights: to load them would be another error
    own = one_card.SHAPES["tiny"] if kind == "Llama" else {}
    getattr(transformers, f"{kind}Config")(**{**own, **sizes}).save_pretrained(folder)
    made = text.train_tokenizer([source.read_text()], 300)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=text.END).save_pretrained(folder)
    assert main([*command(source, tmp_path / "run"), "--model", str(folder)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_one_step_is_timed_as_one(capsys: Any) -> None:
    one_card.print_figures("a", [1.0] * 6, 64, CPU)
    assert ", 1 step timed\n" in capsys.readouterr().out


def test_figures_are_a_row_of_a_table(source: Path, tmp_path: Path, capsys: Any) -> None:
    """A run that keeps nothing prints them too."""
    assert main(command(source, None, "steps=8", "weights=int4", "int8_products=True")) == 0
    printed = capsys.readouterr().out
    assert "3 steps timed" in printed and "wrote" not in printed
    header, rule, row = (line for line in printed.splitlines() if line.startswith("|"))
    assert header == "| settings | GiB | ms | tokens/s |" and rule == "|---|--:|--:|--:|"
    settings, memory, ms, speed = (cell.strip() for cell in row.strip("|").split("|"))
    assert settings.startswith("steps=8 context=64 ")  # the first steps=6 does not count
    assert settings.endswith(" weights=int4 int8_products=True")
    assert 0.1 < float(memory) < 10
    assert float(speed.replace(",", "")) == pytest.approx(
        4 * 64 / float(ms.replace(",", "")) * 1e3, rel=0.01
    )
    for both in ([], ["--measure", "--out", str(tmp_path)]):
        with pytest.raises(SystemExit):
            main(["--model", "tiny", *both])


@pytest.mark.parametrize("weights", one_card.SCHEMES)
def test_int8_products_of_either_weights(weights: str) -> None:
    """The embedding has the scheme of the head, which may share its weight."""
    model = prepared_model("tiny", Config(weights=weights, int8_products=True), CPU)
    schemes = [p.scheme for p in model.parameters() if isinstance(p, lowbit.LowbitTensor)]
    assert len(schemes) == 16 and set(schemes) == {schemes[0]}
    assert len(schemes[0].products) == 3


# ---- errors of a step ------------------------------------------------------------------------------------------------


def chained(*messages: str) -> RuntimeError:
    """The error of the last message, which was raised while that of the one before was handled, and so on."""
    found = None
    for message in messages:
        error = RuntimeError(message)
        error.__context__ = found
        found = error
    assert found is not None
    return found


CAPTURING = "CUDA error: operation not permitted when stream is capturing"
ENDED = "CUDA error: operation failed due to a previous error during capture"


def test_only_an_error_of_capture_is_reported_as_one() -> None:
    for error in (chained(CAPTURING), chained(CAPTURING, ENDED)):
        assert f"captured in a CUDA graph (RuntimeError: {CAPTURING}); --set graph=False" in str(
            way_out(error)
        )
    for first in ("CUDA out of memory. Tried to allocate 2 GiB", "mat1 and mat2 shapes differ"):
        assert way_out(chained(first)) is None and way_out(chained(first, ENDED)) is None


def test_a_failing_compiler_names_the_setting_that_does_without(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        raise OSError("no compiler here")

    plain = one_card.checkpoint_blocks
    broken = partial(torch.compile, backend=failing)
    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(one_card, "checkpoint_blocks", lambda m, d, c: plain(m, d, compiled=True))
    torch.compiler.reset()
    assert main(command(source, None)) == 2
    message = capsys.readouterr().err
    assert "torch.compile can't compile the step (OSError: no compiler here" in message
    assert message.strip().endswith("--set compiled=False runs it without")


def test_other_errors_of_a_step_stay_as_they_are(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*args: Any, **kwargs: Any) -> Any:
        raise chained("shapes differ")

    monkeypatch.setattr(one_card, "train_step", step)
    with pytest.raises(RuntimeError, match="shapes differ"):
        main(command(source, None))
