"""A classifier of images with convolutions, trained with differential privacy for each person: some seconds on a CPU.

    python examples/images.py

The images are drawn here: crosses and squares, 8 x 8, with noise. 2,000 invented people bring one or two each.
"""

import random
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

from dpformer import PrivateTraining


def draw(count, generator):
    """Images [count, 1, 8, 8] and what is on them: 0 is a cross, 1 a square."""
    kinds = torch.randint(0, 2, (count,), generator=generator)
    cross, square = torch.zeros(8, 8), torch.zeros(8, 8)
    cross[2:6, 3:5] = cross[3:5, 2:6] = square[2:6, 2:6] = 1
    square[3:5, 3:5] = 0
    images = torch.stack([cross, square])[kinds] + 0.5 * torch.randn(count, 8, 8, generator=generator)
    return images[:, None], kinds


generator = torch.Generator().manual_seed(0)
images, kinds = draw(3000, generator)
records = [
    {"person": k % 2000, "image": image, "kind": kind}
    for k, (image, kind) in enumerate(zip(images, kinds, strict=True))
]

torch.manual_seed(0)  # of the initial weights; the draws and the noise have keys of their own
model = nn.Sequential(
    *(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ),  # group norm: batch norm mixes people
    *(
        nn.Conv2d(8, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    ),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
with tempfile.TemporaryDirectory() as folder:  # keep the folder in a real run: the same program goes on from there
    private = PrivateTraining(
        *(model, optimizer, records),
        **{"epsilon": 4.0, "delta": 1e-5, "batch_size": 200, "epochs": 4, "run": f"{folder}/run", "micro_batch": 100},
        **{
            "person": "person",
            "records_per_person": 2,
            "combine": random.choice,
        },  # one of a person's images in each step
    )
    for batch in private:
        private.step(lambda: F.cross_entropy(model(batch["image"]), batch["kind"], reduction="none"))  # noqa: B023
    print(private.statement.text().splitlines()[0])
    print(private.movement.text())
    images, kinds = draw(1000, generator)  # of nobody
    print(f"right on new images: {100 * (model(images).argmax(1) == kinds).float().mean():.0f} %")
