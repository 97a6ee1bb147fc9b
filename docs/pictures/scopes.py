"""Draws docs/pictures/scopes.png: which keys each head of a SCOPE layer sees. `make pictures` runs it."""

from pathlib import Path

import torch
from matplotlib.colors import ListedColormap

from farsight.kernels.scoped_attention import Visibility, visible_pairs
from farsight.model.position.scope import geometric_scopes
from farsight.plots import cell_map, picture

LENGTH, HEADS = 64, 8
RATIO_AT = 131072


def draw(path: Path) -> None:
    scopes = geometric_scopes(LENGTH, HEADS)
    dense = torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    seen = Visibility(torch.tensor(scopes)).mask(LENGTH)
    colours = ListedColormap(["white", "#c6dbef", "#08519c"])
    widest = geometric_scopes(RATIO_AT, 32)
    share = visible_pairs(widest, RATIO_AT) / visible_pairs([RATIO_AT] * 32, RATIO_AT)
    with picture(path, 13, 2.2) as figure:
        panels = figure.subplots(1, HEADS, sharey=True)
        for head, axes in enumerate(panels):
            # 0 the future, 1 seen by dense attention alone, 2 seen by this head
            cell_map(
                axes, (dense.int() + seen[head].int()).tolist(), None, cmap=colours, vmin=0, vmax=2, aspect="equal"
            )
            axes.set_title(f"head {head}: {scopes[head]} tokens", fontsize=9)
            axes.set(xticks=[], yticks=[])
        panels[0].set_ylabel("← query", fontsize=9)
        panels[0].set_xlabel("key →", fontsize=9)
        figure.suptitle(
            f"Which keys each head of a SCOPE layer sees (dark), of those that dense attention computes (light). "
            f"At {RATIO_AT:,} tokens and 32 heads that is 1 pair in {1 / share:.1f}.",
            fontsize=10,
        )


if __name__ == "__main__":
    draw(Path(__file__).with_name("scopes.png"))
