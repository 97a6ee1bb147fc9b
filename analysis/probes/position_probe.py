"""Probes that predict a token's position from its hidden state in a layer (SCOPE, appendix B.1; Haviv et al., 2022).

The probes of all layers are trained at once, independently of each other. They share initial weights and batches, so each
comes out as if trained alone.

Shapes: A layers, S sequences, t tokens of one, T tokens of all, D model, W probe width, C outputs.
"""

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farsight.analysis.probes.settings import ProbeSettings
from farsight.errors import ConfigError


def split_sequences(many: int, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draws the sequences to train on and those to hold out, as sorted indices; neither is empty.

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
    """Draws the tokens to use of each sequence, uniformly without replacement: sorted positions, int64 [S, t]."""
    kept = min(settings.tokens_per_sequence, settings.length)
    generator = torch.Generator().manual_seed(settings.seed)
    drawn = [torch.randperm(settings.length, generator=generator)[:kept] for _ in range(sequences)]
    return torch.stack(drawn).sort(dim=1).values


class PositionProbes(nn.Module):
    """A probe for each layer: a linear map, or two with a ReLU between them, on normalised hidden states.

    Args:
        h_ATD: hidden states; the probes normalise by their mean and variance per feature.
    """

    mean_A1D: Tensor
    scale_A1D: Tensor

    def __init__(self, h_ATD: Tensor, settings: ProbeSettings) -> None:
        super().__init__()
        self.settings = settings
        A, D = len(h_ATD), h_ATD.shape[-1]
        # Layer by layer: a float32 copy of all layers could take several times the memory.
        moments = [torch.var_mean(h_TD.float(), dim=0, correction=0) for h_TD in h_ATD]
        self.register_buffer("mean_A1D", torch.stack([mean_D for _, mean_D in moments])[:, None])
        # The clamp keeps constant features at 0.
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
        """Logits of the positions, or the position as a share of the sequence: [A, T, C]."""
        x_ATW = (h_ATD.float() - self.mean_A1D) * self.scale_A1D
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x_ATW = torch.baddbmm(bias, x_ATW.relu() if number else x_ATW, weight)
        return x_ATW

    def loss(self, h_ATD: Tensor, positions_T: Tensor) -> Tensor:
        """Sum over layers of the cross-entropy, or of the mean absolute error as a share of the length."""
        outputs_ATC = self(h_ATD)
        A = len(outputs_ATC)
        if self.settings.target == "class":
            return A * F.cross_entropy(outputs_ATC.flatten(0, 1), positions_T.repeat(A))
        wanted_T = positions_T / (self.settings.length - 1)
        return A * F.l1_loss(outputs_ATC[..., 0], wanted_T.expand(A, -1))

    @torch.no_grad()
    def predict(self, h_ATD: Tensor) -> Tensor:
        """Each layer's prediction of each token's position, [A, T]: the likeliest class, or a number within the sequence."""
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
    """Trains a probe for each layer with Adam; the learning rate falls linearly to 0.

    Args:
        h_ATD: each layer's hidden states.
        positions_T: the tokens' positions, int64.
        progress: called after every step with its number of tokens.
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
    """The first position of each bucket, then the length: equal widths up to rounding."""
    return [-(-bucket * length // buckets) for bucket in range(buckets + 1)]


def mean_by_bucket(distance_AT: Tensor, positions_T: Tensor, settings: ProbeSettings) -> Tensor:
    """Mean over the tokens in each bucket of positions: [A, buckets]; NaN for empty buckets."""
    bucket_T = positions_T * settings.buckets // settings.length
    sums = distance_AT.new_zeros(len(distance_AT), settings.buckets).index_add_(1, bucket_T, distance_AT)
    return sums / bucket_T.bincount(minlength=settings.buckets)


def guess_error(trained_T: Tensor, tested_T: Tensor) -> float:
    """Mean absolute error of always guessing the training tokens' median position: about a quarter of the length."""
    return float((tested_T.double() - trained_T.double().median()).abs().mean())
