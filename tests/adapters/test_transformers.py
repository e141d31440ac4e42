"""The Hugging Face Trainer in one process: ordered, evaluated in between, resumed; padding, checkpointing, LoRA."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
sys.path.insert(0, str(Path(__file__).parent))

from parts import EXAMPLES, Labelled, Pairs, passes
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)

import hemiola
from hemiola.adapters.transformers import LocalSteps, OrderedMixin
from hemiola.gradients.ghost import Recorder
from hemiola.gradients.sketch import parse_sketch

pytestmark = [pytest.mark.filterwarnings("ignore", "error::hemiola.errors.SamplerWarning"), pytest.mark.slow]


class OrderedTrainer(OrderedMixin, Trainer):
    order = "cd-grab"


def arguments(folder, **options):
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **{
            "per_device_train_batch_size": 8,
            "num_train_epochs": 3,
            "save_strategy": "no",
            "learning_rate": 0.05,
            "lr_scheduler_type": "constant",
            **options,
        },
    )


def run(folder, resume=None, model=None, callbacks=(), **options):
    model = model or Labelled()
    trainer = OrderedTrainer(
        model=model,
        args=arguments(folder, **options),
        train_dataset=Pairs(),
        eval_dataset=Pairs(16),
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, model


def test_every_example_once_and_learnt_from(tmp_path):
    trainer, model = run(
        tmp_path, gradient_accumulation_steps=2, eval_strategy="epoch", dataloader_num_workers=2, bf16=True
    )
    assert [sorted(each) for each in passes(model.visited, EXAMPLES)] == [list(range(EXAMPLES))] * 3
    told = trainer.ordered_loader.order.telemetry()
    assert (told["epoch"], told["learnt_from"]) == (2, EXAMPLES)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_checkpoint_of_mid_epoch_goes_on_exactly(tmp_path, accumulate):
    each = 8 * accumulate
    steps = -(-EXAMPLES // each) + 1  # one optimizer step into the second epoch
    options = {"save_strategy": "steps", "save_steps": steps, "gradient_accumulation_steps": accumulate}
    _, whole = run(tmp_path, **options)
    _, second = run(tmp_path, resume=str(tmp_path / f"checkpoint-{steps}"), **options)
    assert second.visited == whole.visited[EXAMPLES + each :]
    for mine, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_without_an_order_is_refused(tmp_path):
    options = {"save_strategy": "epoch"}
    Trainer(model=Labelled(), args=arguments(tmp_path, **options), train_dataset=Pairs()).train()
    with pytest.raises(hemiola.InputError, match="was not saved by a Trainer with an order"):
        run(tmp_path, resume=str(tmp_path / "checkpoint-6"), **options)


def test_local_steps_evaluate_and_save(tmp_path):
    local = LocalSteps(hemiola.Constant(p=4))
    run(tmp_path, callbacks=[local], eval_strategy="epoch", save_strategy="epoch")
    assert [record.period for record in local.averager.history] == [4, 4, 4, 4, 2]
    again = LocalSteps(hemiola.Constant(p=4))
    run(tmp_path, resume=str(tmp_path / "checkpoint-12"), callbacks=[again], eval_strategy="epoch")
    assert [(record.step, record.period) for record in again.averager.history] == [(16, 4), (18, 2)]


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


class Sentences(Pairs):
    """Token sequences of different lengths, padded by the collator of the trainer."""

    def __getitem__(self, index):
        length = 3 + index % 5
        return {"input_ids": [1 + (index + i) % 49 for i in range(length)], "labels": int(self.y[index])}


def padded(items):
    width = max(len(item["input_ids"]) for item in items)
    rows = [item["input_ids"] + [0] * (width - len(item["input_ids"])) for item in items]
    mask = [[1] * len(item["input_ids"]) + [0] * (width - len(item["input_ids"])) for item in items]
    return {
        "input_ids": torch.tensor(rows),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


@pytest.mark.parametrize("variant", ["plain", "checkpointed", "lora"])
def test_bert_on_padded_batches(tmp_path, variant):
    model, options = bert(), {}
    if variant == "checkpointed":
        options = {"gradient_checkpointing": True}
    if variant == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))
    trainer = OrderedTrainer(
        model=model,
        args=arguments(tmp_path, num_train_epochs=2, **options),
        train_dataset=Sentences(),
        data_collator=padded,
    )
    trainer.train()
    told = trainer.ordered_loader.order.telemetry()
    assert (told["trained_on"], told["learnt_from"]) == (EXAMPLES, EXAMPLES)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2),
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            pad_token_id=0,
        ),
    ],
    ids=["GPT-2", "Llama"],
)
def test_ghosts_see_every_layer_of_a_language_model(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    recorder = Recorder(model, parse_sketch("ghost:2"), 0)
    tokens = torch.randint(1, 40, (4, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        recording = recorder.start(4)
        model(input_ids=tokens, labels=tokens).loss.backward()
        recorder.rows(recording)
    # GPT-2's positions are one row for all examples, so their gradient is nobody's.
    assert [name for name in recorder.left_out if "wpe" not in name] == []
    recorder.close()
