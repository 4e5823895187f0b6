"""Checkpoints that a test writes without a run."""

from posttrain.train.saver import ShardSaver, shards_of


def save_shards(folder, model, optimizer, step):
    """Write ``folder/model`` and ``folder/optim``, and wait for it. A collective over the default process group."""
    ShardSaver(deadline_s=600.0).start(folder, shards_of(model, optimizer, step), background=False)
