"""Network with the layers of AlexNet for pictures of 32 x 32 pixels.

Its dropout is 0, because each stage of a pipeline would draw masks from its own generator.
"""

from __future__ import annotations

from torch import nn


class AlexNet(nn.Module):
    """Convolutions with pooling, followed by three linear layers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, kernel_size=5, stride=2, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((3, 3))
        self.classifier = nn.Sequential(
            nn.Dropout(0.0),
            nn.Linear(32 * 3 * 3, 64),
            nn.ReLU(inplace=True),
            nn.Dropout(0.0),
            nn.Linear(64, 64),
            nn.ReLU(inplace=True),
            nn.Linear(64, num_classes),
        )

    def forward(self, x):
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


vgg19 = AlexNet
