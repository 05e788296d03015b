"""transformers: save_pretrained and the Trainer's checkpoints of models whose weights are low-bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lowbit
from tests.tensor.cases import same_bits

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

INT4 = lowbit.Int4WeightOnly(32)
KINDS = (torch.nn.Linear, torch.nn.Embedding)
PREPARE = {
    "int4": lambda m: lowbit.quantize_(m, INT4),
    "int4 tied": lambda m: lowbit.quantize_(
        m, INT4, lambda module, name: isinstance(module, KINDS)
    ),
    "int8 dynamic": lambda m: lowbit.quantize_(m, lowbit.Int8DynamicActivationInt8Weight()),
    "float8": lambda m: lowbit.quantize_(m, lowbit.Float8WeightOnly()),
    "qat": lambda m: lowbit.qat.prepare_(m, INT4),
    "Int8Weight": lambda m: lowbit.train.prepare_(m, lowbit.Int8Weight()),
    "bitnet": lambda m: lowbit.train.prepare_(m, lowbit.BitNet()),
}
HIGH = "qat", "bitnet"
"""Those of which the state dict holds high-precision values."""
UP = "model.layers.0.mlp.up_proj.weight"
over = pytest.mark.parametrize("how", PREPARE)


def llama(how, seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=how == "int4 tied",
    )
    model = transformers.LlamaForCausalLM(config)
    PREPARE[how](model)
    return model


def logits(model):
    tokens = torch.arange(40).view(2, 20) % 96
    with torch.no_grad():
        return model(input_ids=tokens).logits


def loaded(folder):
    return {
        name: t
        for file in sorted(folder.glob("*.safetensors"))
        for name, t in safetensors.load_file(file).items()
    }


@over
@pytest.mark.parametrize("shards", ["5GB", "50KB"])
def test_saved_and_loaded_into_a_model_prepared_alike(how, shards, tmp_path):
    model, other = llama(how), llama(how, seed=1)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    assert (len([*tmp_path.glob("*.safetensors")]) > 1) is (shards == "50KB")
    found = other.load_state_dict(loaded(tmp_path), strict=how != "int4 tied")
    assert not found.unexpected_keys
    assert all(name.startswith("lm_head.weight.") for name in found.missing_keys)
    assert same_bits(logits(other), logits(model))


@over
def test_from_pretrained_reads_what_was_saved(how, tmp_path):
    """Low-bit weights come back as such; those that train in high precision are written, and read, in it."""
    model = llama(how)
    model.save_pretrained(tmp_path)
    found, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    read = found.get_parameter(UP)
    if how in HIGH:
        assert type(read.data) is torch.Tensor
        assert same_bits(read.detach(), model.state_dict()[UP])
    else:
        assert type(read.data) is type(model.get_parameter(UP).data)
        assert same_bits(logits(found), logits(model))


@pytest.mark.parametrize("how", [how for how in PREPARE if how not in HIGH])
def test_parts_that_no_config_describes_are_reported(how, tmp_path):
    """As in a folder of a version that described none: transformers fills the weights with random values, and lists
    each of them, with the parts that it did not use."""
    model = llama(how)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(found.get_parameter(UP).data) is torch.Tensor
    low = [name for name, p in model.named_parameters() if isinstance(p, lowbit.LowbitTensor)]
    assert UP in low
    assert {*low} <= {*info["missing_keys"]} <= {*low, "lm_head.weight"}
    assert {f"{name}.{part}" for name in low for part in ("codes", "scale")} <= {
        *info["unexpected_keys"]
    }


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(96, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(model, folder, steps, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **options,
    )
    optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=1e-2)
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        optimizers=(optimizer, None),
    )


@pytest.mark.parametrize("how", ["qat", "Int8Weight", "bitnet"])
def test_a_trainer_that_resumes_gives_the_same_bits(how, tmp_path):
    pytest.importorskip("accelerate")
    whole = llama(how)
    trainer(whole, tmp_path / "whole", 6).train()
    first = llama(how)
    # the run stops after four of the six steps of the learning-rate schedule
    stopped = trainer(first, tmp_path / "parts", 6)
    stopped.add_callback(StopAt(4))
    stopped.train()
    again = llama(how, seed=1)
    trainer(again, tmp_path / "parts", 6).train(
        resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-4")
    )
    states = whole.state_dict(), again.state_dict()
    assert [*states[0]] == [*states[1]]
    for name, value in states[0].items():
        assert same_bits(value, states[1][name]), name
    assert same_bits(logits(whole), logits(again))
    assert not same_bits(logits(whole), logits(first)), "which stopped before"
    assert any(name.endswith("weight.place") for name in states[0]) is (how == "Int8Weight")


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step
        return control


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    pytest.importorskip("accelerate")
    model = llama("Int8Weight")
    run = trainer(
        model, tmp_path, 4, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True
    )
    run.train()
    best = llama("Int8Weight", seed=1)
    best.load_state_dict(loaded(Path(run.state.best_model_checkpoint)))
    for name, value in best.state_dict().items():
        assert same_bits(value, model.state_dict()[name]), name
