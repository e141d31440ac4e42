"""The table of docs/frameworks.md, cell by cell: what works in which client, in one process with the real framework.

What needs two ranks is tested in the files that `RANKS` names.
"""

import ast
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

for package in ("lightning", "accelerate", "transformers", "peft", "torchdata"):
    pytest.importorskip(package)
sys.path.insert(0, str(Path(__file__).parent))

import lightning as L  # noqa: E402
import peft  # noqa: E402
from accelerate import Accelerator, DataLoaderConfiguration  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

import hemiola  # noqa: E402
from hemiola.adapters.accelerate import ordered  # noqa: E402
from hemiola.adapters.lightning import Ordered  # noqa: E402
from hemiola.adapters.transformers import OrderedMixin  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore", "error::hemiola.errors.SamplerWarning"), pytest.mark.slow]

EXAMPLES, BATCH, EPOCHS = 24, 4, 2
PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"

ERRORS = {
    ("Lightning", "batch_sampler"): "a batch sampler of its own cannot be ordered: Reversed",
    ("Accelerate", "batch_sampler"): "a batch sampler of its own cannot be ordered: Reversed",
}
NOT_THERE = {("Trainer", "StatefulDataLoader"), ("Trainer", "batch_sampler")}
CLIENTS = ("plain loop", "Lightning", "Accelerate", "Trainer")
FEATURES = (
    "one process",
    "workers + prefetch",
    "accumulation",
    "bf16",
    "compile",
    "gradient checkpointing",
    "dict batches",
    "padding",
    "LoRA",
    "tied weights",
    "StatefulDataLoader",
    "batch_sampler",
)
RANKS = {
    "torchrun, local steps": {
        "plain loop": "test_ddp.py::test_gradients_stay_local_and_weights_are_averaged",
        "Lightning": "test_frameworks_real.py::test_lightning_resumes_in_mid_epoch",
        "Accelerate": "test_frameworks_real.py::test_accelerate_deals_averages_saves_and_goes_on",
        "Trainer": "test_frameworks_real.py::test_the_trainer_deals_averages_and_resumes",
    },
    "torchrun, DDP": {
        "plain loop": "../loops/test_sampler_real.py::test_real_ranks_are_handed_what_the_paper_says",
        "Lightning": "test_frameworks_real.py::test_lightning_deals_every_example_once_and_ends_with_one_model",
        "Accelerate": "test_frameworks_real.py::test_accelerate_deals_averages_saves_and_goes_on",
        "Trainer": "test_frameworks_real.py::test_the_trainer_deals_averages_and_resumes",
    },
    "resume in mid-epoch": {
        "plain loop": "../loops/test_sampler_resume.py::test_resuming_after_any_step_gives_exactly_the_rest",
        "Lightning": "test_lightning.py::test_a_checkpoint_of_mid_epoch_goes_on_exactly",
        "Accelerate": "test_accelerate.py::test_a_saved_state_goes_on_in_mid_epoch",
        "Trainer": "test_transformers.py::test_a_checkpoint_of_mid_epoch_goes_on_exactly",
    },
}


class Sentences(Dataset):
    """Token sequences with a label; of different lengths where they are to be padded."""

    def __init__(self, lengths=(6,)):
        random = torch.Generator().manual_seed(0)
        self.items = [
            {"input_ids": torch.randint(1, 20, (lengths[i % len(lengths)],), generator=random), "labels": i % 3}
            for i in range(EXAMPLES)
        ]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def padded(items):
    tokens = nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], batch_first=True)
    return {"input_ids": tokens, "labels": torch.tensor([item["labels"] for item in items])}


class Tagger(nn.Module):
    """An embedding, two linear layers, and a head; called with keywords, answers with a dict."""

    def __init__(self, tied=False, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.mix, self.checkpointed = nn.Embedding(20, 8), nn.Linear(8, 8), checkpointed
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def body(self, x):
        return torch.relu(self.mix(self.tokens(x)))

    def forward(self, input_ids, labels):
        x = checkpoint(self.body, input_ids, use_reentrant=False) if self.checkpointed else self.body(input_ids)
        logits = self.head(x.mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Reversed(Sampler):
    """A batch sampler of the user's own, which lets no sampler be put into it."""

    def __iter__(self):
        return iter([list(range(start, start + BATCH)) for start in reversed(range(0, EXAMPLES, BATCH))])

    def __len__(self):
        return EXAMPLES // BATCH


def model_of(feature):
    model = Tagger(tied=feature == "tied weights", checkpointed=feature == "gradient checkpointing")
    if feature == "LoRA":
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["mix", "head"]))
    return model


def loader_of(feature, sampler=None):
    data = Sentences((3, 6, 4) if feature == "padding" else (6,))
    kind = StatefulDataLoader if feature == "StatefulDataLoader" else DataLoader
    options = {"num_workers": 2, "prefetch_factor": 2} if feature == "workers + prefetch" else {}
    if feature == "batch_sampler":
        own = Reversed() if sampler is None else Bucketed(sampler)
        return kind(data, batch_sampler=own, collate_fn=padded)
    if sampler is not None:
        return kind(data, BATCH, sampler=sampler, collate_fn=padded, **options)
    return kind(data, BATCH, shuffle=True, collate_fn=padded, **options)


class Bucketed(BatchSampler):
    """Draws two batches' worth and regroups them."""

    def __init__(self, sampler):
        super().__init__(sampler, BATCH, drop_last=False)

    def __iter__(self):
        source = iter(self.sampler)
        while drawn := sorted(islice(source, 2 * BATCH)):
            yield from (drawn[start : start + BATCH] for start in range(0, len(drawn), BATCH))


def plain_loop(feature, folder):
    sampler = hemiola.OrderedSampler(range(EXAMPLES))
    loader, model = sampler.track(loader_of(feature, sampler)), model_of(feature)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sampler.watch(model):
        called = torch.compile(model, backend="aot_eager") if feature == "compile" else model
        for _ in range(EPOCHS):
            for number, batch in enumerate(loader):
                with torch.autocast("cpu", torch.bfloat16, enabled=feature == "bf16"):
                    called(**batch)["loss"].backward()
                if feature != "accumulation" or number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
    return sampler.telemetry()


class Module(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, number):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lightning(feature, folder):
    order, module = Ordered("cd-grab"), Module(model_of(feature))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        callbacks=[order],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2 if feature == "accumulation" else 1,
        precision="bf16-mixed" if feature == "bf16" else "32-true",
    )
    if feature == "compile":
        module.model.compile(backend="aot_eager")
    trainer.fit(module, loader_of(feature))
    return order.sampler.telemetry()


def accelerate(feature, folder):
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2 if feature == "accumulation" else 1,
        mixed_precision="bf16" if feature == "bf16" else "no",
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=feature == "StatefulDataLoader"),
    )
    module = model_of(feature)
    model, optimizer, loader = accelerator.prepare(
        module, torch.optim.SGD(module.parameters(), lr=0.1), loader_of(feature)
    )
    loader = ordered(accelerator, loader, model)
    called = torch.compile(model, backend="aot_eager") if feature == "compile" else model
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model), accelerator.autocast():
                accelerator.backward(called(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
    told = loader.order.telemetry()
    loader.order.detach()
    return told


class OrderedTrainer(OrderedMixin, Trainer):
    order = "cd-grab"


def trainer(feature, folder):
    running = OrderedTrainer(
        model=model_of(feature),
        args=TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            per_device_train_batch_size=BATCH,
            num_train_epochs=EPOCHS,
            gradient_accumulation_steps=2 if feature == "accumulation" else 1,
            bf16=feature == "bf16",
            torch_compile=feature == "compile",
            torch_compile_backend="aot_eager" if feature == "compile" else None,
            dataloader_num_workers=2 if feature == "workers + prefetch" else 0,
            remove_unused_columns=False,
        ),
        train_dataset=Sentences((3, 6, 4) if feature == "padding" else (6,)),
        data_collator=padded,
    )
    running.train()
    return running.ordered_loader.order.telemetry()


RUN = dict(zip(CLIENTS, (plain_loop, lightning, accelerate, trainer), strict=True))


@pytest.fixture(autouse=True)
def _alone():
    """Accelerate keeps its state in singletons; compiled graphs count against a limit of the process."""
    yield
    torch._dynamo.reset()
    for each in (AcceleratorState, PartialState, GradientState):
        each._reset_state()


@pytest.mark.parametrize(
    ("client", "feature"),
    [(client, feature) for client in CLIENTS for feature in FEATURES if (client, feature) not in NOT_THERE],
    ids=lambda name: name.replace(" ", "-"),
)
def test_a_cell_of_the_table(client, feature, tmp_path):
    if (client, feature) in ERRORS:
        with pytest.raises(hemiola.InputError, match=ERRORS[client, feature]):
            RUN[client](feature, tmp_path)
        return
    told = RUN[client](feature, tmp_path)
    assert (told["epoch"], told["trained_on"], told["learnt_from"]) == (EPOCHS - 1, EXAMPLES, EXAMPLES)
    assert told["herding"] > 0


def cell(client, feature):
    if (client, feature) in NOT_THERE:
        return "the Trainer makes its own loader"
    return "clear error" if (client, feature) in ERRORS else "works"


def test_the_page_has_this_table():
    rows = [(feature, *(cell(client, feature) for client in CLIENTS)) for feature in FEATURES]
    rows += [(feature, *("works" for _ in CLIENTS)) for feature in RANKS]
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    assert text in PAGE.read_text(encoding="utf-8"), text


@pytest.mark.parametrize("feature", RANKS)
def test_what_needs_two_ranks_is_tested_where_the_table_says(feature):
    for place in RANKS[feature].values():
        file, _, name = place.partition("::")
        tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, place
