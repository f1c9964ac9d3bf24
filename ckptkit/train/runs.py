"""A run from its configuration: checks, then ranks."""

from ckptkit.core.layouts import Layout
from ckptkit.errors import LayoutError
from ckptkit.train import launch
from ckptkit.train.config import Config
from ckptkit.train.loop import Options, Summary


def train(
    config: Config, layout: Layout | str = "tp=1", device: str = "auto", options: Options | None = None
) -> Summary:
    """Train in a layout until `[train] steps`: on processes of this machine, or as the rank that torchrun started.

    Args:
        config: Of the run.
        layout: Of the ranks; its size is how many are started.
        device: `cpu`, `cuda` (ROCm, too), or `auto` for GPUs where there are enough.
        options: What is asked of this call; nothing unless given.

    Returns:
        What rank 0 (or this rank) saw.

    Raises:
        LayoutError: the layout does not fit the model, the batch or the sequence.
        UsageError: missing data, or a configuration that makes no sense.
        InterruptedRunError: the run was asked to stop, and has saved.
        TrainingError: the loss is no number.
    """
    from ckptkit.train import data, loop, trainer

    options = options or Options()
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    # What can be told at once is told here, by one process.
    model = trainer.bind(config)
    trainer.check(config, model, layout)
    data.check(config.data, config.train.seq_len)
    started = launch.under_torchrun()
    if started is not None:
        rank, world, local = started
        if world != layout.world:
            raise LayoutError(f"layout {layout} has {layout.world} ranks, torchrun started {world}")
        kind = launch.device_kind(device, local + 1)
        return loop.run(rank, "env://", launch.device_of(kind, local), config, layout, options)
    kind = launch.device_kind(device, layout.world)
    preload = ["torch.distributed.pipelining"] if layout.pp > 1 else []
    results: list[Summary] = launch.launch(
        loop.run, layout.world, config, layout, options, device=kind, preload=preload
    )
    return results[0]
