"""Random traces: one seed, one trace of events, faults and recoveries over a `World`."""

import random
from typing import Any

from ckptkit.cache import events as ev
from ckptkit.cache.settings import Settings
from tests.cache.world import Violation, World


class Trace:
    """A trace of `steps` events drawn by `seed`. `calm` scales how often faults come (0: never)."""

    def __init__(self, seed: int, calm: float = 1.0) -> None:
        self.rng = rng = random.Random(seed)
        hosts, ranks = rng.choice([(1, 2), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2)])
        copies = rng.choice([0, 1, 1, 1, 2])
        settings = Settings(
            vote_s=20, replica_s=30, inventory_s=15, zombie_s=10, kill_zombies=rng.random() < 0.3,
            drain_every=rng.choice([0, 0, 2]),
        )  # fmt: skip
        self.world = World(
            hosts, ranks, rng.choice([2, 3, 4]), copies, settings, domains=rng.choice([0, 2, 3])
        )
        self.faults = rng.choice([0.2, 1.0, 3.0]) * calm
        self.world.new_epoch(list(self.world.hosts))
        self.log: list[str] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.world.check()
        self.settle()

    # --- one event --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.02 * self.faults:
            return self.fault()
        choice = rng.random()
        if choice < 0.55 and self.world.bag:
            self.message()
        elif choice < 0.75 and (ops := [(n, op) for n, h in self.world.hosts.items() for op in h.ops]):
            name, op = rng.choice(ops)
            self.say("finish", name, op)
            self.world.finish(name, op, fails=rng.random() < 0.03 * self.faults)
        elif choice < 0.92 and (can := [(p, a) for p in self.world.processes for a in self.world.actions(p)]):
            # those behind first: ranks of one job keep step, more or less
            process, (action,) = min(rng.sample(can, min(3, len(can))), key=lambda pair: pair[0].step)
            if action in ("begin", "seal") and rng.random() < 0.02 * self.faults:
                action = {"begin": "skip", "seal": "abort"}[action]
            bad = action in ("load", "seal") and rng.random() < 0.01 * self.faults
            self.say(action, process.rank, process.step, "badly" if bad else "")
            self.world.act(process, action, fails=bad)
        else:
            self.tick(rng.choice([0.1, 1, 1, 3]))

    def message(self) -> None:
        rng, bag = self.rng, self.world.bag
        at = rng.randrange(len(bag)) if rng.random() < 0.3 else 0
        to, message = bag[at]
        if rng.random() < 0.05 * self.faults:
            self.say("drop", to, message)
            del bag[at]
            return
        self.say("deliver", to, message)
        if rng.random() >= 0.05 * self.faults:
            del bag[at]
        self.world.deliver(to, message)
        if rng.random() < 0.1 and self.world.crash_at is None:
            before = self.seen_of(to)
            self.world.deliver(to, message)
            if self.seen_of(to) != before:
                raise Violation("I13", f"{message} changed {to} a second time")

    def seen_of(self, name: str) -> Any:
        """What messages may change for good."""
        host = self.world.hosts[name]
        node, coordinator = host.node, host.coordinator
        mine = (
            (list(node.table), node.record, node.restore, node.bans, set(node.saves.open)) if node else None
        )
        return mine, (
            coordinator.record,
            coordinator.restore,
            set(coordinator.ballots),
        ) if coordinator else None

    def tick(self, seconds: float) -> None:
        self.world.now += seconds
        for name, host in self.world.hosts.items():
            if self.rng.random() < 0.7:
                self.say("tick", name, seconds)
                if host.node is not None:
                    self.world.handle(name, ev.Tick())
                if host.coordinator is not None:
                    self.world.handle(name, ev.Tick(), coordinator=True)

    def fault(self) -> None:
        rng, world = self.rng, self.world
        name = rng.choice(list(world.hosts))
        host = world.hosts[name]
        kind = rng.choices(
            ["crash", "crash within", "boot", "kill", "lose", "epoch", "flip", "scribble", "long", "drain", "pressure", "again"],
            [3, 4, 6, 2, 0.7, 2, 1, 3, 2, 1, 1, 2],
        )[0]  # fmt: skip
        self.say("FAULT", kind, name)
        if kind == "crash" and host.node is not None:
            world.crash(name)
        elif kind == "crash within":
            world.crash_at = (name, rng.randrange(6))
        elif kind == "boot":
            self.boot_all()
        elif kind == "kill" and (living := [p for p in world.processes if p.alive]):
            world.kill(rng.choice(living))
        elif kind == "lose":
            world.lose(name)
        elif kind == "epoch":
            self.new_epoch()
        elif kind == "flip" and (sealed := [s for s, r in host.disk.slots.items() if r.state == "SEALED"]):
            slot = rng.choice(sealed)
            world.flip(name, slot)
            if host.node is not None and rng.random() < 0.7:
                world.handle(name, ev.Scrubbed(slot, host.disk.slots[slot].seq, (0,)))
        elif kind == "scribble":
            for process in world.processes:
                for slot in process.slots.values() if process.alive else ():
                    world.scribble(process, slot)
        elif kind == "long":
            self.tick(50)
        elif kind == "drain":
            world.handle(name, ev.Operator(drain=True))
        elif kind == "pressure":
            world.handle(name, ev.Pressure(2, rng.randrange(3)))
            world.handle(name, ev.Pressure(0))
        elif kind == "again" and world.bag:
            to, message = rng.choice(world.bag)
            world.bag.append((to, message))

    def new_epoch(self) -> None:
        world, rng = self.world, self.rng
        names = list(world.hosts)
        if len(names) > 1 and rng.random() < 0.2:
            names.remove(rng.choice(names))
        ranks = world.ranks if rng.random() < 0.8 else rng.randint(1, world.ranks)
        # now and then two incarnations start at once and take the same number
        number = world.epochs if rng.random() < 0.1 else None
        world.new_epoch(names, ranks=ranks, zombies=rng.choice([0, 0, 1, 2]), number=number)

    def boot_all(self) -> None:
        for name, host in self.world.hosts.items():
            if host.node is None:
                self.world.boot(name)

    def say(self, *words: Any) -> None:
        self.log.append(" ".join(str(word) for word in words))

    # --- I14 --------------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Without further faults the job comes back, saves commit and get their copies, and no slot is stuck."""
        world = self.world
        world.crash_at = None
        for process in [p for p in world.processes if p.alive]:
            world.kill(process)
        self.boot_all()
        world.new_epoch(list(world.hosts))
        epoch = world.processes[-1].epoch
        for _ in range(60):
            self.fair_round()
            stored = world.hosts[epoch.coordinator].disk.coordinator
            if (
                stored is not None
                and stored.inc == epoch.inc
                and stored.restore is not None
                and stored.restore.error
            ):
                whole = [v for v, ranks in world.valid().items() if len(ranks) == world.past.worlds.get(v)]
                assert not whole, f"I14: {stored.restore.error}, but {whole} are there"
                epoch = world.new_epoch(list(world.hosts), fresh=True)
            record = self.record_of(epoch)
            if record is not None and record.keep is not None and record.keep.inc == epoch.inc:
                break
        else:
            raise AssertionError(
                f"I14: no save of the last epoch got its copies; record {self.record_of(epoch)}"
            )
        for _ in range(3):
            self.quiet_round()
        self.check_slots(epoch)

    def record_of(self, epoch: Any) -> Any:
        stored = self.world.hosts[epoch.coordinator].disk.coordinator
        return stored.record if stored is not None and stored.inc == epoch.inc else None

    def fair_round(self) -> None:
        world = self.world
        slowest = min((p.step for p in world.processes if p.alive), default=0)
        for process in list(world.processes):
            for (action,) in list(world.actions(process)):
                if action != "begin" or process.step == slowest:
                    world.act(process, action)
        self.quiet_round()

    def quiet_round(self) -> None:
        world = self.world
        for _ in range(40):
            busy = False
            for name, host in world.hosts.items():
                for op in list(host.ops):
                    if op in host.ops:
                        busy = True
                        world.finish(name, op)
            while world.bag:
                busy = True
                world.deliver(*world.bag.pop(0))
            world.check()
            if not busy:
                break
        world.now += 3
        for name, host in world.hosts.items():
            world.handle(name, ev.Tick())
            if host.coordinator is not None:
                world.handle(name, ev.Tick(), coordinator=True)
        world.check()

    def check_slots(self, epoch: Any) -> None:
        record = self.record_of(epoch)
        for name, host in self.world.hosts.items():
            assert host.node is not None
            for found in host.node.table:
                wanted = found.version in (record.newest, record.keep, record.cand, record.drain)
                writing = found.state == "WRITING" and any(
                    p.alive and p.owner == found.writer and found.slot in p.slots.values()
                    for p in self.world.processes
                )
                fine = (
                    found.state in ("FREE", "RETIRED") or wanted or writing or host.node.table.evictable(found.slot, host.node.record)
                    or (found.state == "SEALED" and found.version is not None and not host.node.decided(found.version))
                )  # fmt: skip
                assert fine, f"I14: slot {found.slot} of {name} is stuck: {found}, record {record}"
