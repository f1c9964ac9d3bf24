"""A reshard that takes its time, run here or in a forked process that can be killed."""

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

from ckptkit.core.destination import Fixup
from ckptkit.core.plan import make_plan
from ckptkit.engine.run import RunResult, run
from ckptkit.stores.base import Reader
from ckptkit.stores.local import LocalReader, LocalStore
from tests.engine.toy import Toy, destination, write


class SlowReader(LocalReader):
    def readinto(self, offset: int, buffer: memoryview) -> None:
        time.sleep(0.0005)
        super().readinto(offset, buffer)


class SlowStore(LocalStore):
    """Takes its time, so that there are moments to be killed at."""

    def open(self, path: str) -> Reader:  # type: ignore[override]
        reader = super().open(path)
        fd = os.dup(reader.fileno())
        reader.close()
        return SlowReader(fd, reader.size, reader.where)


class Job:
    """A plan from `folder`/src to `folder`/out, with a fix-up and digests; `layout`: of the destination."""

    def __init__(self, folder: str, layout: str) -> None:
        toy = Toy(roles=("param", "master"), sizes={"hidden": 24, "vocab": 40})
        source = toy.catalog("tp=4,dp=2,ep=2,zero=1", "megatron", 64)
        self.target = toy.catalog(layout, "canonical", 64)
        self.folder, self.out = folder, folder + "/out"
        write(folder + "/src", source, toy.bytes_of(source))
        self.expected = toy.bytes_of(self.target)
        self.plan = make_plan(source, self.target)
        fixup = Fixup("crc32", 64, self.target.files[0].size, (0,))
        self.destination = destination(self.target, digests=True, fixups={0: [fixup]})

    def reshard(self, *, slow: bool = False, out: str = "", **options: Any) -> RunResult:
        """Run the plan, with options of `engine.run`."""
        store = (SlowStore if slow else LocalStore)(self.folder + "/src")
        return run(self.plan, self.destination, store, out or self.out, sync_every_s=0.003, **options)


def forked(work: Callable[[], object]) -> int:
    """The process id of a child that does some work, and ends with 0, or with 1 where it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of a linear algebra library
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child
