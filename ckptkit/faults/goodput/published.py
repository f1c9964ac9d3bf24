"""Published failure records of large runs, as counts, to compare with; and what each implies.

Sources: "The Llama 3 Herd of Models" (Meta, 2024), table of unexpected interruptions; "Revisiting Reliability in Large-Scale
Machine Learning Research Clusters" (HPCA 2025), clusters RSC-1 and RSC-2; "OPT: Open Pre-trained Transformer Language Models" (2022)
and the waste quoted in "Gemini: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints" (SOSP 2023).
"""

from dataclasses import dataclass

from ckptkit.faults.goodput.closed_forms import rate_of_mtbf

LLAMA3_CAUSES = {
    "faulty GPU": 148,
    "GPU HBM3 memory": 72,
    "software bug": 54,
    "network switch or cable": 35,
    "host maintenance": 32,
    "GPU SRAM memory": 19,
    "GPU system processor": 17,
    "NIC": 7,
    "NCCL watchdog timeouts": 7,
    "silent data corruption": 6,
    "GPU thermal interface and sensor": 6,
    "SSD": 3,
    "power supply": 3,
    "server chassis": 2,
    "IO expansion board": 2,
    "dependency": 2,
    "CPU": 2,
    "system memory": 2,
}
"""Unexpected interruptions by cause. Counts, since the percentages printed beside them do not all belong to them."""


@dataclass(frozen=True)
class Record:
    """What a run or fleet reported.

    Attributes:
        gpus, gpus_per_node: Of the job.
        days: How long.
        interruptions: In that time.
    """

    name: str
    gpus: int
    days: float
    interruptions: int
    gpus_per_node: int = 8

    @property
    def nodes(self) -> float:
        return self.gpus / self.gpus_per_node

    @property
    def mtbf_s(self) -> float:
        return self.days * 86400 / self.interruptions

    @property
    def per_1000_node_days(self) -> float:
        return rate_of_mtbf(self.mtbf_s, self.nodes)


LLAMA3 = Record("Llama 3 405B, unexpected", 16384, 54, sum(LLAMA3_CAUSES.values()))
LLAMA3_ALL = Record("Llama 3 405B, with planned", 16384, 54, 466)
OPT_175B = Record("OPT-175B", 992, 60, 105)
OPT_175B_WASTED_GPU_HOURS = 178_000

RSC1_PER_1000_NODE_DAYS = 6.50
RSC2_PER_1000_NODE_DAYS = 2.34
