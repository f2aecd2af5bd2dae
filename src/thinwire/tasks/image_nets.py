"""Two image classifiers that are small enough for a CPU.

`CNN` has convolutions and biases only. `ResNet` has BatchNorm, whose running statistics are buffers and not parameters:
the case that breaks naive averaging of models.

In the shape comments N is the batch, K the channels, S the height and width.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class CNN(nn.Module):
    """Three convolutions and one linear layer, 26k parameters; takes images of 4x4 and larger."""

    def __init__(self, *, channels: int, classes: int):
        """Make the layers for images with `channels` channels."""
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1)
        self.head = nn.Linear(64 * 2 * 2, classes)

    def forward(self, images: Tensor) -> Tensor:  # [N, K, S, S]
        """Scores of the classes: [N, classes]."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)  # [N, 16, S/2, S/2]
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # [N, 32, S/4, S/4]
        x = F.adaptive_avg_pool2d(F.relu(self.conv3(x)), 2)  # [N, 64, 2, 2] for every S
        return self.head(x.flatten(1))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: ResNet's basic block."""

    def __init__(self, inputs: int, outputs: int, *, stride: int):
        """Make the layers; the shortcut is a 1x1 convolution where the shape changes."""
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:  # [N, inputs, S, S]
        """The block's result: [N, outputs, S / stride, S / stride]."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 with a 3x3 stem and a free width: 64 is the original, 16 has 0.7M parameters."""

    def __init__(self, *, channels: int, classes: int, width: int = 16):
        """Make four stages of two blocks; each stage doubles the width and all but the first halve the image."""
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    ResidualBlock(widths[i], widths[i + 1], stride=1 if i == 0 else 2),
                    ResidualBlock(widths[i + 1], widths[i + 1], stride=1),
                )
                for i in range(4)
            )
        )
        self.head = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:  # [N, K, S, S]
        """Scores of the classes: [N, classes]."""
        x = self.stages(self.stem(images))  # [N, 8 * width, S/8, S/8]
        return self.head(x.mean(dim=(2, 3)))
