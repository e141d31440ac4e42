"""What each of two ranks does with the real frameworks: `torchrun framework_ranks.py FOLDER`.

One start of the processes serves all scenarios; test_frameworks_real.py looks at the results.
"""

import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))

from parts import Labelled, Net, Numbered, Pairs

import hemiola


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def with_lightning(folder):
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    from hemiola.adapters.lightning import LocalSteps, Ordered

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.validated = Net(), []

        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, number):
            self.validated.append(self.net.first.weight.detach().clone())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def fit(strategy, resume=None, callbacks=(), **options):
        order, model = Ordered("cd-grab"), Module()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategy,
            callbacks=[order, *callbacks],
            max_epochs=3,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **{"enable_checkpointing": False, **options},
        )
        loader = DataLoader(Numbered(), batch_size=4, shuffle=True)
        trainer.fit(model, loader, DataLoader(Numbered(8), batch_size=4), ckpt_path=resume)
        return model, order, trainer

    plain, order, _ = fit("ddp")
    found = {"ddp": {"visited": plain.net.visited, "told": order.sampler.telemetry(), "weights": weights(plain)}}
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=8, save_top_k=-1)
    local, order, trainer = fit(LocalSteps(hemiola.Constant(p=3)), callbacks=[saving], enable_checkpointing=True)
    found["local"] = {
        "visited": local.net.visited,
        "told": order.sampler.telemetry(),
        "weights": weights(local),
        "validated": local.validated,
        "periods": [record.period for record in trainer.strategy.averager.history],
    }
    again, _, trainer = fit(LocalSteps(hemiola.Constant(p=3)), resume=folder / "step=8.ckpt")
    found["resumed"] = {
        "visited": again.net.visited,
        "weights": weights(again),
        "steps": [record.step for record in trainer.strategy.averager.history],
    }
    return found


def with_accelerate(folder):
    from accelerate import Accelerator

    from hemiola.adapters.accelerate import LocalSGD, ordered

    accelerator = Accelerator(cpu=True)
    net = Net()
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(Numbered(), batch_size=4, shuffle=True)
    )
    loader = ordered(accelerator, loader, model)
    with LocalSGD(accelerator, model, hemiola.Constant(p=4)) as local_sgd:
        for epoch in range(3):
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                if (epoch, number) == (1, 2):
                    accelerator.save_state(str(folder / "accelerate"))
                    with local_sgd.averaged():
                        averaged = weights(net)
    found = {
        "visited": list(net.visited),
        "told": loader.order.telemetry(),
        "weights": weights(net),
        "averaged": averaged,
        "periods": [record.period for record in local_sgd.averager.history],
    }
    accelerator.wait_for_everyone()
    loader.order.detach()
    accelerator.load_state(str(folder / "accelerate"))
    found["loaded"] = weights(net)
    loader.order.attach(model)
    net.visited.clear()
    with local_sgd:
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
    found["rest"] = net.visited
    loader.order.detach()
    return found


def with_transformers(folder):
    from transformers import Trainer, TrainingArguments

    from hemiola.adapters.transformers import LocalSteps, OrderedMixin

    class OrderedTrainer(OrderedMixin, Trainer):
        order = "cd-grab"

    def run(resume=None):
        model, local = Labelled(), LocalSteps(hemiola.Constant(p=4))
        arguments = TrainingArguments(
            output_dir=str(folder / "trainer"),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            per_device_train_batch_size=4,
            num_train_epochs=3,
            save_strategy="steps",
            save_steps=9,
            eval_strategy="epoch",
            learning_rate=0.05,
        )
        trainer = OrderedTrainer(
            model=model, args=arguments, train_dataset=Pairs(), eval_dataset=Pairs(8), callbacks=[local]
        )
        trainer.train(resume_from_checkpoint=resume)
        return {
            "visited": model.visited,
            "told": trainer.ordered_loader.order.telemetry(),
            "weights": weights(model),
            "steps": [record.step for record in local.averager.history],
        }

    return {"whole": run(), "resumed": run(str(folder / "trainer" / "checkpoint-9"))}


def with_defaults(folder):
    """The frameworks as they come, given a loader with a sampler of ours instead of the adapter."""
    import lightning as L
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

    class Sampled(Trainer):
        def _get_train_sampler(self, *args):
            return hemiola.OrderedSampler(self.train_dataset)

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "default_root_dir": folder, "max_epochs": 1}

    def loader():
        data = Numbered()
        return DataLoader(data, batch_size=4, sampler=hemiola.OrderedSampler(data))

    def lightning():
        L.Trainer(accelerator="cpu", devices=2, strategy="ddp", **quiet).fit(Module(), loader())

    def fabric():
        parts = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
        parts.launch()
        list(parts.setup_dataloaders(loader()))

    def accelerate():
        list(Accelerator(cpu=True).prepare(loader()))

    def trainer():
        options = {"output_dir": str(folder / "defaults"), "use_cpu": True, "report_to": "none", "disable_tqdm": True}
        arguments = TrainingArguments(per_device_train_batch_size=4, num_train_epochs=1, save_strategy="no", **options)
        Sampled(model=Labelled(), args=arguments, train_dataset=Pairs()).train()

    said = {}
    for framework in (accelerate, trainer, fabric, lightning):
        try:
            framework()
        except hemiola.InputError as error:
            said[framework.__name__] = str(error)
    return said


def main():
    folder = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", hemiola.SamplerWarning)
    for scenario in (with_accelerate, with_transformers, with_defaults, with_lightning):
        found = scenario(folder)
        torch.save(found, folder / f"{scenario.__name__}-{torch.distributed.get_rank()}.pt")
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
