"""All drills. Importing this fills `base.DRILLS`."""

from ckptkit.faults.drills.catalogue import processes

__all__ = ["processes"]
