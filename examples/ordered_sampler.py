"""An ordinary training loop, once in random order and once with the order chosen by CD-GraB.

The loop is the same; only the sampler differs, and `watch`, which reads what it needs from the model's hooks.

    python examples/ordered_sampler.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hemiola

EPOCHS, BATCH, RATE, DECAY = 12, 16, 0.5, 1e-3

pixels, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))


def objective(model: nn.Module) -> float:
    """What the loop minimises, over the whole data set."""
    with torch.no_grad():
        loss = F.cross_entropy(model(dataset.tensors[0]), dataset.tensors[1])
        return float(loss + DECAY / 2 * sum(p.square().sum() for p in model.parameters()))


def train(order: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=DECAY)
    sampler = hemiola.OrderedSampler(dataset, order=order)
    loader = sampler.track(DataLoader(dataset, batch_size=BATCH, sampler=sampler))
    after_epochs = []
    with sampler.watch(model):
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            after_epochs.append(objective(model))
    return after_epochs


def minimum() -> float:
    """The smallest value of the objective, by L-BFGS."""
    torch.manual_seed(0)
    model = nn.Linear(64, 10).double()
    x, y = dataset.tensors[0].double(), dataset.tensors[1]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + DECAY / 2 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)
    return closure().item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    best = minimum()
    random, ordered = train("rr"), train("cd-grab")
    print("distance to the minimum of the training objective after each epoch")
    print("epoch   random order   cd-grab")
    for epoch, (a, b) in enumerate(zip(random, ordered, strict=True), 1):
        print(f"{epoch:5d}   {a - best:12.5f}   {b - best:7.5f}")
    print(f"after {EPOCHS} epochs random order is {(random[-1] - best) / (ordered[-1] - best):.1f} times as far away")
