"""What the adapter tests train: a tiny task whose inputs say which example they are."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

EXAMPLES, FEATURES, CLASSES = 48, 6, 3


class Numbered(Dataset):
    """Example i: features, with i itself in the first one, and a label."""

    def __init__(self, examples: int = EXAMPLES) -> None:
        random = torch.Generator().manual_seed(1)
        self.x = torch.randn(examples, FEATURES, generator=random)
        self.x[:, 0] = torch.arange(examples)
        self.y = torch.randint(CLASSES, (examples,), generator=random)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Pairs(Numbered):
    """The same as dicts, as the Trainer wants them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Net(nn.Module):
    """Two layers that do not look at the number; keeps which examples it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.visited: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.visited += x[:, 0].long().tolist()
        return self.second(torch.relu(self.first(torch.cat([0 * x[:, :1], x[:, 1:]], 1))))


class Labelled(Net):
    """A model as the Trainer wants them: keyword inputs, a dict with the loss."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def passes(visited: list[int], each: int) -> list[list[int]]:
    """What was visited, cut into epochs."""
    return [visited[start : start + each] for start in range(0, len(visited), each)]
