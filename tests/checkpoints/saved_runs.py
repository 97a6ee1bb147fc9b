"""A run's checkpoint manager in this process, with a model of one matrix."""

from torch import nn

from farsight.checkpoints.manager import ModelWeights, RunCheckpoints
from farsight.configs.load import build_config


class State(dict):
    """A saved part of the training state."""

    def state_dict(self):
        return dict(self)

    def load_state_dict(self, state):
        self.update(state)

    def check_order(self, saved):
        assert saved == {}


class Run:
    """A run's manager with one matrix to save; all of its values equal the step."""

    def __init__(self, run_folder, sections=None, **options):
        architecture = {"vocab_size": 64, "dim": 8, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 8}
        config = build_config(
            {
                "architecture": {**architecture, "ffn_dim": 8}, "job": {"dump_folder": str(run_folder)},
                "checkpoint": {"interval": 3, **options}, **(sections or {}),
            }
        )  # fmt: skip
        self.model = nn.Linear(512, 512, bias=False)
        self.manager = RunCheckpoints(
            config,
            {
                "model": ModelWeights([self.model]), "optimizer": State(), "dataloader": State(order="{}"),
                "train_state": State(tokens_seen=0),
            },
        )  # fmt: skip
        self.folder = run_folder / config.checkpoint.folder

    def save(self, step, last_step=False):
        nn.init.constant_(self.model.weight, step)
        self.manager.save(step, last_step)
        if (
            self.manager.save_future is None
        ):  # what a test does next to the files is not to happen while they are verified
            self.manager.upkeep.verdict()
        nn.init.constant_(self.model.weight, -1)  # training changes the weights during a save

    def load(self, **options):
        self.manager.load(**options)
        value = self.model.weight.detach()
        assert (value == value[0, 0]).all()
        return int(value[0, 0])

    def shard(self, step):
        return self.folder / f"step-{step}" / "__0_0.distcp"
