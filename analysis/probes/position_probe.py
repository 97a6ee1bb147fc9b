"""A probe that tells a token's position in its sequence from what a layer says of it (SCOPE, appendix B.1; Haviv et al., 2022).

All layers' probes are trained at once, each on its own layer: with the same initial weights and the same batches, so that a
layer's probe is what it would be if no other layer had one.

Shapes: A layers, S sequences, T tokens, D hidden states' width, W the probe's, C outputs.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farsight.configs.load import ConfigError

Kind = Literal["mlp", "linear"]
Target = Literal["class", "number"]
"""What the probe is trained to give: which of the positions it is, or how far along the sequence it lies."""


@dataclass(frozen=True)
class ProbeSettings:
    """What is trained, and on what.

    Raises:
        ConfigError: a setting that nothing can be trained with.
    """

    length: int
    """Positions that a token may have: tokens a sequence."""
    probe: Kind = "mlp"
    target: Target = "number"
    epochs: int = 5
    width: int = 128
    """Of the MLP's hidden layer."""
    learning_rate: float = 3e-3
    batch: int = 256
    """Tokens a step."""
    held_out: float = 0.2
    """Share of the sequences that the error is measured on."""
    tokens_per_sequence: int = 256
    buckets: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ConfigError(f"--length {self.length}: there is one position; set 2 or more.")
        if not 1 <= self.buckets <= self.length:
            raise ConfigError(f"--buckets {self.buckets}: set from 1 to the {self.length} tokens of a sequence.")


def split_sequences(many: int, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of the sequences to train on and of those held out, drawn at random, both in order; neither is empty.

    Raises:
        ConfigError: fewer than two sequences.
    """
    if many < 2:
        raise ConfigError(
            f"{many} sequence: probes are trained on some and tested on others; give more text or a shorter --length."
        )
    tested = min(max(round(many * held_out), 1), many - 1)
    order = torch.randperm(many, generator=torch.Generator().manual_seed(seed))
    return order[tested:].sort().values, order[:tested].sort().values


def draw_positions(sequences: int, settings: ProbeSettings) -> Tensor:
    """Positions of the tokens that are taken of each sequence, in order, uniformly without replacement: int64 [S, t]."""
    kept = min(settings.tokens_per_sequence, settings.length)
    generator = torch.Generator().manual_seed(settings.seed)
    drawn = [torch.randperm(settings.length, generator=generator)[:kept] for _ in range(sequences)]
    return torch.stack(drawn).sort(dim=1).values


class PositionProbes(nn.Module):
    """A probe for each layer: two linear layers with a ReLU between them, or one, on features of mean 0 and variance 1.

    Args:
        h_ATD: hidden states whose mean and variance are made 0 and 1.
    """

    mean_A1D: Tensor
    scale_A1D: Tensor

    def __init__(self, h_ATD: Tensor, settings: ProbeSettings) -> None:
        super().__init__()
        self.settings = settings
        A, D = len(h_ATD), h_ATD.shape[-1]
        # Layer by layer: in float32 all of them together could be several times what is held.
        moments = [torch.var_mean(h_TD.float(), dim=0, correction=0) for h_TD in h_ATD]
        self.register_buffer("mean_A1D", torch.stack([mean_D for _, mean_D in moments])[:, None])
        # A feature that never changes says nothing and stays 0.
        self.register_buffer(
            "scale_A1D", torch.stack([var_D.clamp_min(1e-12).rsqrt() for var_D, _ in moments])[:, None]
        )
        outputs = settings.length if settings.target == "class" else 1
        sizes = [D, settings.width, outputs] if settings.probe == "mlp" else [D, outputs]
        generator = torch.Generator().manual_seed(settings.seed)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for inputs, size in itertools.pairwise(sizes):
            bound = 1 / math.sqrt(inputs)
            for parameters, shape in ((self.weights, (inputs, size)), (self.biases, (1, size))):
                drawn = torch.empty(shape).uniform_(-bound, bound, generator=generator).to(h_ATD.device)
                parameters.append(nn.Parameter(drawn.expand(A, *shape).clone()))

    def forward(self, h_ATD: Tensor) -> Tensor:
        """[A, T, C]: logits of the positions, or the share of the sequence before the token."""
        x_ATW = (h_ATD.float() - self.mean_A1D) * self.scale_A1D
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x_ATW = torch.baddbmm(bias, x_ATW.relu() if number else x_ATW, weight)
        return x_ATW

    def loss(self, h_ATD: Tensor, positions_T: Tensor) -> Tensor:
        """Sum over the layers: cross-entropy, or the mean absolute distance as a share of the length."""
        outputs_ATC = self(h_ATD)
        A = len(outputs_ATC)
        if self.settings.target == "class":
            return A * F.cross_entropy(outputs_ATC.flatten(0, 1), positions_T.repeat(A))
        wanted_T = positions_T / (self.settings.length - 1)
        return A * F.l1_loss(outputs_ATC[..., 0], wanted_T.expand(A, -1))

    @torch.no_grad()
    def predict(self, h_ATD: Tensor) -> Tensor:
        """Position of each token by each layer's probe, [A, T]: the likeliest, or a number within the sequence."""
        found = []
        for part_ATD in h_ATD.split(1024, dim=1):
            outputs_ATC, last = self(part_ATD), self.settings.length - 1
            if self.settings.target == "class":
                found.append(outputs_ATC.argmax(dim=-1).float())
            else:
                found.append((outputs_ATC[..., 0] * last).clamp(0, last))
        return torch.cat(found, dim=1)


def train_probes(
    h_ATD: Tensor, positions_T: Tensor, settings: ProbeSettings, progress: Callable[[int], object] | None = None
) -> PositionProbes:
    """Trains a probe for each layer with Adam; the learning rate falls to 0 in a straight line.

    Args:
        h_ATD: hidden states of the tokens by each layer.
        positions_T: int64, theirs.
        progress: told the tokens of every step.
    """
    probes = PositionProbes(h_ATD, settings)
    T = len(positions_T)
    steps = settings.epochs * math.ceil(T / settings.batch)
    optimizer = torch.optim.Adam(probes.parameters(), lr=settings.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    generator = torch.Generator().manual_seed(settings.seed + 1)
    for _ in range(settings.epochs):
        for rows in torch.randperm(T, generator=generator).to(h_ATD.device).split(settings.batch):
            optimizer.zero_grad()
            probes.loss(h_ATD[:, rows], positions_T[rows]).backward()
            optimizer.step()
            schedule.step()
            if progress is not None:
                progress(len(rows))
    return probes


def bucket_edges(length: int, buckets: int) -> list[int]:
    """Where buckets begin, the length last: of equal width, but for rounding."""
    return [-(-bucket * length // buckets) for bucket in range(buckets + 1)]


def mean_by_bucket(distance_AT: Tensor, positions_T: Tensor, settings: ProbeSettings) -> Tensor:
    """[A, buckets]: the mean over the tokens of each bucket of positions; NaN where it has none."""
    bucket_T = positions_T * settings.buckets // settings.length
    sums = distance_AT.new_zeros(len(distance_AT), settings.buckets).index_add_(1, bucket_T, distance_AT)
    return sums / bucket_T.bincount(minlength=settings.buckets)


def guess_error(trained_T: Tensor, tested_T: Tensor) -> float:
    """Mean absolute distance of the best single guess, the median of the training tokens' positions: about a quarter of the length."""
    return float((tested_T.double() - trained_T.double().median()).abs().mean())
