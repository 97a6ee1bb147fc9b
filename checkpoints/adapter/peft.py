"""LoRA in PEFT's files: by the names of `transformers`' modules, and as one block matrix where these fuse several of ours.

Phi-3's `qkv_proj` is our wq, wk and wv one below the other. With A of q, k and v below each other, and their B as blocks on a
diagonal, B·A is the three products one below the other: one adapter of the summed ranks, made of the same numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.checkpoints.model_dir.hf_config import names_of_type
from farsight.configs.finetuning import Lora, Projection
from farsight.configs.schema import Architecture
from farsight.errors import ConfigError
from farsight.model.adapt.lora import as_pattern, by_linear, our_linear

Group = tuple[str, ...]
"""Our linear layers (`layers.3.attention.wq`) that are the rows of one module, in its order; most modules have one."""


class PeftNames:
    """The modules of `transformers`' model of a base, and the tensors of an adapter on them.

    Args:
        model_type: that of the base's `config.json`.
        architecture: that of the base.
    """

    def __init__(self, model_type: str, architecture: Architecture) -> None:
        a = architecture
        self.names = names_of_type(model_type, a.norm_placement)
        queries, keys = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
        self.rows = {"wq": queries, "wk": keys, "wv": keys, "wo": a.dim, "w1": a.ffn_dim, "w3": a.ffn_dim, "w2": a.dim}
        """Outputs of our linear layers, by the last part of their names."""

    def module(self, linear: str) -> str:
        """The module that holds a linear layer of ours."""
        module = self.names.of(f"{linear}.weight").removesuffix(".weight")
        return module.replace("model.", "model.language_model.", 1) if self.names.vision else module

    def group(self, linear: str) -> Group:
        """All linear layers of the same module."""
        return tuple(part.removesuffix(".weight") for part in self.names.parts(self.names.of(f"{linear}.weight")))

    # ── Tensors ───────────────────────────────────────────────────────────────────────────────────────

    def join(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An adapter's tensors by PEFT's names in a file, from those by ours (`layers.3.attention.wq.lora_A.default.weight`)."""
        joined = {}
        for (group, kind), names in self._wholes(tensors).items():
            parts = {linear: tensors[name] for linear, name in names.items()}
            joined[self._file_name(group, kind)] = self._whole(group, kind, parts)
        return joined

    def split(self, joined: Mapping[str, Tensor], names: Iterable[str], path: Path) -> dict[str, Tensor]:
        """The reverse of `join`.

        Args:
            names: our names of the adapter's tensors.
            path: the file, for errors.

        Raises:
            ConfigError: B of a fused module is not made of blocks, because the adapter was trained further elsewhere.
        """
        tensors: dict[str, Tensor] = {}
        for (group, kind), ours in self._wholes(names).items():
            whole = joined[self._file_name(group, kind)]
            parts = self._parts(group, kind, whole, [*ours])
            if not torch.equal(self._whole(group, kind, parts), whole):
                raise ConfigError(
                    f"{path}: {self._file_name(group, kind)} is not made of a block for each of {', '.join(group)}: the adapter was "
                    "trained further elsewhere. Merge it there, with peft, and open the merged model."
                )
            tensors |= {ours[linear]: part.contiguous() for linear, part in parts.items()}
        return tensors

    def _wholes(self, names: Iterable[str]) -> dict[tuple[Group, str], dict[str, str]]:
        """For each tensor of the file, its parts: our names by linear layer."""
        wholes: dict[tuple[Group, str], dict[str, str]] = {}
        for name in names:
            linear, _, rest = name.partition(".lora_")
            wholes.setdefault((self.group(linear), rest.split(".")[0]), {})[linear] = name
        return wholes

    def _file_name(self, group: Group, kind: str) -> str:
        return f"base_model.model.{self.module(group[0])}.lora_{kind}" + (".weight" if kind in ("A", "B") else "")

    def _whole(self, group: Group, kind: str, parts: Mapping[str, Tensor]) -> Tensor:
        own = [linear for linear in group if linear in parts]
        values = [parts[linear] for linear in own]
        if len(group) == 1 or kind != "B":
            return values[0] if len(group) == 1 else torch.cat(values)
        rank = values[0].shape[1]
        whole = values[0].new_zeros(sum(self._out(linear) for linear in group), rank * len(own))
        for linear, rows in zip(group, whole.split([self._out(linear) for linear in group]), strict=True):
            if linear in parts:  # LoRA may be on some of a module's linear layers alone
                rows.narrow(1, rank * own.index(linear), rank).copy_(parts[linear])
        return whole

    def _parts(self, group: Group, kind: str, whole: Tensor, linears: Sequence[str]) -> dict[str, Tensor]:
        own = [linear for linear in group if linear in linears]
        if len(group) == 1:
            return {group[0]: whole}
        if kind == "A":
            return dict(zip(own, whole.chunk(len(own)), strict=True))
        if kind != "B":
            return dict(zip(own, whole.split([self._out(linear) for linear in own]), strict=True))
        by_rows = dict(zip(group, whole.split([self._out(linear) for linear in group]), strict=True))
        return {linear: by_rows[linear].chunk(len(own), dim=1)[column] for column, linear in enumerate(own)}

    def _out(self, linear: str) -> int:
        return self.rows[linear.rpartition(".")[2]]

    # ── Settings ──────────────────────────────────────────────────────────────────────────────────────

    def lora_config(self, lora: Lora, layers: Sequence[int]) -> dict[str, Any]:
        """The modules, ranks and alphas of PEFT's `LoraConfig`.

        Raises:
            ConfigError: settings that differ between the linear layers of one module.
        """
        ranks, alphas = by_linear(lora.rank_pattern, lora, layers), by_linear(lora.alpha_pattern, lora, layers)
        fused = {module for module in lora.modules if len(self.group(our_linear(0, module))) > 1}
        for layer in layers:
            for module in lora.modules:
                group = self.group(our_linear(layer, module))
                together = [other for other in lora.modules if our_linear(layer, other) in group]
                if module != together[0] or module not in fused:
                    continue
                name = self.module(group[0])
                sizes = [(ranks.pop((layer, m), lora.rank), alphas.pop((layer, m), lora.alpha)) for m in together]
                if len({*sizes}) > 1:
                    raise ConfigError(
                        f"lora: {', '.join(together)} are one module of this base, {name}, and so need one rank and alpha, not "
                        f"{', '.join(f'{rank} and {alpha:g}' for rank, alpha in sizes)}: change rank_pattern or alpha_pattern."
                    )
                if lora.dora and len(together) < len(group):
                    raise ConfigError(
                        f"lora.dora = true on {', '.join(together)} alone: they are part of one module of this base, {name}, and DoRA "
                        "scales all of its rows. Name all of its projections in lora.modules."
                    )
                rank, alpha = sizes[0]
                # So that the scale, alpha / rank or alpha / sqrt(rank), is that of each block.
                ranks[layer, module] = len(together) * rank
                alphas[layer, module] = alpha * len(together) ** (0.5 if lora.rslora else 1)
        modules = {self.module(our_linear(layer, module)): None for layer in layers for module in lora.modules}
        if self.names.vision:  # the vision model has modules of the same names
            chosen: dict[str, Any] = {"target_modules": "|".join(name.replace(".", r"\.") for name in modules)}
        else:
            chosen = {
                "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
                "layers_to_transform": list(layers),
                "layers_pattern": "layers",
            }
        return {
            **chosen, "rank_pattern": as_pattern(ranks, self._name), "alpha_pattern": as_pattern(alphas, self._name),
        }  # fmt: skip

    def _name(self, layer: int, module: Projection) -> str:
        return self.module(our_linear(layer, module))
