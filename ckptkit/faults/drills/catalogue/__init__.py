"""All drills. Importing this fills `base.DRILLS`."""

from ckptkit.faults.drills.catalogue import memory, processes, protocol, storage, training

__all__ = ["memory", "processes", "protocol", "storage", "training"]
