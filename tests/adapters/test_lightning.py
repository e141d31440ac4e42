"""Lightning in one process: the real Trainer with the callback."""

import sys
from pathlib import Path

import pytest
import torch

L = pytest.importorskip("lightning")
sys.path.insert(0, str(Path(__file__).parent))

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from parts import EXAMPLES, Net, Numbered, passes  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import hemiola  # noqa: E402
from hemiola.adapters.lightning import Ordered  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore", "error::hemiola.errors.SamplerWarning"), pytest.mark.slow]


class Module(L.LightningModule):
    """A training step that calls a part of the module; ``forward`` is not even there."""

    def __init__(self, lr=0.1):
        super().__init__()
        self.net, self.lr = Net(), lr
        self.validated = []

    def training_step(self, batch, number):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, number):
        self.validated.append(self.net.first.weight.detach().clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Calling(Module):
    """A training step that calls the module itself, on a dict."""

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, number):
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self(x), y)}


def trainer(folder, callbacks, **options):
    return L.Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **{"max_epochs": 3, "enable_checkpointing": False, "devices": 1, **options},
    )


def loader(**options):
    return DataLoader(Numbered(), batch_size=8, shuffle=True, **options)


def reference(epochs=3):
    """The order that a plain loop over the same sampler gives."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ordered = hemiola.OrderedLoader(Numbered(), batch_size=8)
    with ordered.sampler.watch(net):
        for _ in range(epochs):
            for x, y in ordered:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
    return net.visited


@pytest.mark.parametrize("module", [Module, Calling])
def test_the_order_is_that_of_a_plain_loop(tmp_path, module):
    order, model = Ordered("cd-grab"), module()
    trainer(tmp_path, [order]).fit(model, loader(), DataLoader(Numbered(), batch_size=8))
    assert model.net.visited == reference()
    told = order.sampler.telemetry()
    assert (told["epoch"], told["learnt_from"]) == (2, EXAMPLES)
    assert "training_step" not in vars(model)
    assert "forward" not in vars(model)


def test_workers_accumulation_and_bf16(tmp_path):
    order, model = Ordered("cd-grab"), Calling()
    options = {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    trainer(tmp_path, [order], **options).fit(model, loader(num_workers=2))
    assert [sorted(each) for each in passes(model.net.visited, EXAMPLES)] == [list(range(EXAMPLES))] * 3
    told = order.sampler.telemetry()
    assert (told["epoch"], told["learnt_from"]) == (2, EXAMPLES)


def test_a_checkpoint_of_mid_epoch_goes_on_exactly(tmp_path):
    whole = Calling()
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10, save_top_k=-1)
    trainer(tmp_path, [Ordered("cd-grab"), saving], enable_checkpointing=True).fit(whole, loader())
    second = Calling()
    trainer(tmp_path, [Ordered("cd-grab")]).fit(second, loader(), ckpt_path=tmp_path / "step=10.ckpt")
    assert second.net.visited == whole.net.visited[10 * 8 :]
    for mine, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_cannot_be_ordered_is_said_in_one_line(tmp_path):
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `Ordered`"):  # Lightning's own word
        trainer(tmp_path, [Ordered(), Ordered()])
    with pytest.raises(hemiola.InputError, match="one training loader can be ordered"):
        trainer(tmp_path, [Ordered()]).fit(Module(), [loader(), loader()])
