"""The daemon's metrics, in a registry of its own. Names are listed in docs/cache/operations.md."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """All metrics. `refresh` is called before each scrape and sets the gauges that are read from the daemon's state."""

    def __init__(self, version: str, refresh: Callable[["Metrics"], None] = lambda metrics: None) -> None:
        self.registry = CollectorRegistry()
        self._refresh = refresh

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ckptkit_cache_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"ckptkit_cache_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"ckptkit_cache_{name}", text, labels, registry=self.registry, buckets=_SECONDS)

        # Trainers, as they tell it.
        self.save_stall = histogram("save_stall_seconds", "Time of a save in the trainer, by phase.", "phase")
        self.save_skipped = counter("save_skipped", "Saves that trainers skipped.", "reason")
        self.skipped_consecutive = gauge(
            "saves_skipped_consecutive", "Most saves in a row that a rank of this node skipped."
        )
        self.d2h_bytes = counter("d2h_bytes", "Bytes copied from devices into slots.")
        self.register_seconds = gauge("register_seconds", "Time to register the slots with the device.")
        self.register_mode = gauge(
            "register_mode", "1 for the way slots are used: registered or bounce.", "mode"
        )

        # Slots and memory.
        self.hash_seconds = histogram("hash_seconds", "From seal to the last digest of a shard.")
        self.hash_mismatch = counter("hash_mismatch", "Bytes that differed from their digest.", "where")
        self.slots = gauge("slots", "Slots.", "lane", "state")
        self.slot_reuse = counter("slot_reuse", "Slots that were begun again.")
        self.populate_rate = gauge("populate_bytes_per_second", "Rate at which slots were populated last.")
        self.budget_bytes = gauge("budget_bytes", "Bytes of all slots.")
        self.mem_available = gauge("mem_available_bytes", "MemAvailable of the node.")
        self.pressure_actions = counter(
            "pressure_actions", "What was done because memory was short.", "action"
        )
        self.quarantined = gauge("quarantined_slots", "Slots that a fenced process may still write to.")
        self.retired = gauge("retired_slots", "Slots with bad memory.")
        self.recovery_slots = counter(
            "recovery_slots", "Slots found at start, by what became of them.", "result"
        )

        # Protocol.
        self.votes = counter("votes", "Votes of this node.", "result")
        self.commit = counter("commit", "Versions decided by this coordinator.", "outcome")
        self.commit_latency = histogram("commit_latency_seconds", "From the first vote to the commit.")
        self.committed_step = gauge("committed_step", "Newest committed step.")
        self.level_step = gauge(
            "level_step", "Newest step of each level: 1 committed, 2 replicated, 3 durable.", "level"
        )
        self.epoch = gauge("epoch", "Epoch of the job.")
        self.fenced = counter("fenced", "Calls and messages of earlier epochs that were refused.")
        self.events = counter("events", "What the protocol notes.", "name")

        # Copies.
        self.replica_bytes = counter("replica_bytes", "Bytes of shards to and from peers.", "dir")
        self.replica_lag = gauge(
            "replica_lag_seconds", "Since when the newest committed step waits for its copies."
        )
        self.replica_degraded = gauge("replica_degraded", "1 while copies take too long.")
        self.domain_collision = gauge("domain_collision", "1 where copies share a failure domain.")
        self.level2_age = gauge("level2_age_seconds", "Since when no step was replicated.")

        # Durable storage.
        self.drain_bytes = counter("drain_bytes", "Bytes written to durable storage.")
        self.drain_seconds = gauge("drain_seconds", "Time that the last drain of this node took.")
        self.drain_retries = counter("drain_retries", "Drains that failed and were tried again.")
        self.drain_skipped = counter(
            "drain_skipped", "Steps that were to be drained and were overtaken by newer ones."
        )
        self.durable_step = gauge("durable_step", "Newest durable step.")
        self.durable_age = gauge("durable_age_seconds", "Since when no step became durable.")

        # Restore.
        self.restore_attempts = counter("restore_attempts", "Decisions of what to restore.")
        self.restore_loop = gauge(
            "restore_loop", "How often the same step was restored without a commit in between."
        )
        self.restore_bytes = counter("restore_bytes", "Bytes that ranks read in restores.", "source")
        self.restore_seconds = histogram("restore_seconds", "Time of restores in ranks.", "source")
        self.restore_rejected = counter(
            "restore_rejected", "Versions and copies that a restore could not use.", "reason"
        )

        # The daemon.
        self.scrub_bytes = counter("scrub_bytes", "Bytes read again and compared.")
        self.http_requests = counter("http_requests", "Requests of peers.", "path", "code")
        self.refused = counter(
            "refused", "Connections, calls and requests that were refused.", "door", "reason"
        )
        self.certificate_days = gauge("certificate_days_left", "Days until this node's certificate expires.")
        gauge("build_info", "1, labelled with the version.", "version").labels(version).set(1)

    def text(self) -> bytes:
        """All metrics as Prometheus reads them."""
        self._refresh(self)
        return generate_latest(self.registry)
