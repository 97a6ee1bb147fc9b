"""Draws docs/pictures/scopes.png: which keys each head of a SCOPE layer sees. `make pictures` runs it."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt

from farsight.kernels.scoped_attention import Visibility, visible_pairs
from farsight.model.position.scope import geometric_scopes

LENGTH, HEADS = 64, 8
RATIO_AT = 131072


def draw(path: Path) -> None:
    scopes = geometric_scopes(LENGTH, HEADS)
    dense = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    seen = Visibility(torch.tensor(scopes)).mask(LENGTH)
    figure, panels = plt.subplots(1, HEADS, figsize=(13, 2.2), layout="constrained", sharey=True)
    for head, axes in enumerate(panels):
        # 0 the future, 1 seen by dense attention alone, 2 seen by this head
        axes.imshow(dense.int() + seen[head].int(), cmap=_colours(), vmin=0, vmax=2, interpolation="nearest")
        axes.set_title(f"head {head}: {scopes[head]} tokens", fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    panels[0].set_ylabel("← query", fontsize=9)
    panels[0].set_xlabel("key →", fontsize=9)
    widest = geometric_scopes(RATIO_AT, 32)
    share = visible_pairs(widest, RATIO_AT) / visible_pairs([RATIO_AT] * 32, RATIO_AT)
    figure.suptitle(
        f"Which keys each head of a SCOPE layer sees (dark), of those that dense attention computes (light). "
        f"At {RATIO_AT:,} tokens and 32 heads that is 1 pair in {1 / share:.1f}.",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _colours() -> matplotlib.colors.ListedColormap:
    return matplotlib.colors.ListedColormap(["white", "#c6dbef", "#08519c"])


if __name__ == "__main__":
    draw(Path(__file__).with_name("scopes.png"))
