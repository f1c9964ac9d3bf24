"""Layouts: a device mesh, its rank order, pipeline stages and the ZeRO rule.

Rank order follows Megatron-LM (`parallel_state.RankGenerator`): an order string from the fastest to the
slowest axis. Dense tensors live on the mesh `tp x cp x dp x pp`; experts on `etp x ep x edp x pp` of the same ranks,
with `edp = tp * cp * dp / (etp * ep)`.
"""

import re
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from ckptkit.errors import LayoutError

ZERO_RULES = ("even", "megatron", "deepspeed", "whole")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
MAX_WORLD = 1 << 22
_DEGREES = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Layout:
    """How a model is cut over ranks. `str(layout)` is what `--layout` takes.

    Attributes:
        tp, pp, vpp, ep, etp, cp, dp: Degrees: tensor, pipeline, virtual pipeline (chunks per stage), expert,
            expert-tensor, context and data parallel.
        zero: 0 none; 1 or 2 optimizer state cut over data parallel ranks; 3 everything cut on dim 0, as FSDP2 does.
        rule: How `zero` 1 and 2 cut (`ckptkit.core.zero`): even, megatron, deepspeed or whole.
        stages: Layers of each pipeline stage, or None for an even split.
        order: Rank order, fastest axis first.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    dp: int = 1
    zero: int = 0
    rule: str = "even"
    stages: tuple[int, ...] | None = None
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        for name in (*_DEGREES, "zero"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise LayoutError(f"layout {name}={value!r}: must be a whole number")
            if value < 1 and name != "zero":
                raise LayoutError(f"layout {name}={value}: a degree is at least 1")
        if self.world > MAX_WORLD:
            raise LayoutError(f"layout has {self.world} ranks; more than {MAX_WORLD} are not supported")
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"layout zero={self.zero}: ZeRO stages are 0, 1, 2 and 3")
        if self.rule not in ZERO_RULES:
            raise LayoutError(f"layout zero rule {self.rule!r}: known rules are {', '.join(ZERO_RULES)}")
        if self.zero not in (1, 2):
            object.__setattr__(self, "rule", "even")  # equal layouts are written alike, and compare equal
        if sorted(str(self.order).split("-")) != sorted(DEFAULT_ORDER.split("-")):
            raise LayoutError(
                f"layout order={self.order}: must be tp, cp, ep, dp, pp in some order, like {DEFAULT_ORDER}"
            )
        if (self.tp * self.cp * self.dp) % (self.etp * self.ep):
            raise LayoutError(
                f"layout {self}: etp*ep = {self.etp * self.ep} must divide tp*cp*dp = {self.tp * self.cp * self.dp}, "
                "since experts live on the ranks of one pipeline stage; change ep, etp or dp"
            )
        self._check_stages()
        if self.pp > 1 and self._faster_than_pp(self._dense_sizes) != self._faster_than_pp(
            self._expert_sizes
        ):
            raise LayoutError(
                f"layout {self}: order {self.order} puts dense and expert tensors of one rank on different "
                "pipeline stages; put pp last"
            )

    def _check_stages(self) -> None:
        if self.stages is None:
            return
        object.__setattr__(self, "stages", tuple(self.stages))
        if not all(
            isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in self.stages
        ):
            raise LayoutError(f"layout stage sizes {self.stages}: must be whole numbers, one a stage")
        if len(self.stages) != self.pp:
            raise LayoutError(
                f"layout {self}: pp={self.pp} needs {self.pp} stage sizes, has {len(self.stages)}"
            )
        if self.vpp > 1:
            raise LayoutError(f"layout {self}: stage sizes and vpp cannot be combined")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read `tp=2,pp=4:6/7/7/7,ep=4,dp=4,zero=1:whole,order=tp-cp-ep-dp-pp`; names may come in any order."""
        values: dict[str, object] = {}
        for item in filter(None, re.split(r"[,\s]+", text.strip())):
            name, sign, value = item.partition("=")
            if not sign or name in values or name not in {*_DEGREES, "zero", "order"}:
                known = ", ".join((*_DEGREES, "zero", "order"))
                why = "is given twice" if name in values else f"is not NAME=VALUE with one of {known}"
                raise LayoutError(f"layout {text!r}: {item!r} {why}")
            if name == "order":
                values[name] = value
                continue
            number, colon, detail = value.partition(":")
            if not _NUMBER.fullmatch(number):
                raise LayoutError(f"layout {text!r}: {item!r} needs a whole number")
            values[name] = int(number)
            if colon and name == "pp":
                sizes = detail.split("/")
                if not all(_NUMBER.fullmatch(size) for size in sizes):
                    raise LayoutError(f"layout {text!r}: stage sizes look like pp=4:6/7/7/7, not {item!r}")
                values["stages"] = tuple(int(size) for size in sizes)
            elif colon and name == "zero":
                values["rule"] = detail
            elif colon:
                raise LayoutError(f"layout {text!r}: {item!r} takes nothing after ':'")
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        default = Layout.__dataclass_fields__
        parts = []
        for name in _DEGREES:
            value = getattr(self, name)
            if name == "pp" and self.stages is not None:
                parts.append(f"pp={value}:{'/'.join(map(str, self.stages))}")
            elif value != default[name].default:
                parts.append(f"{name}={value}")
        if self.zero:
            parts.append(f"zero={self.zero}" + ("" if self.rule == "even" else f":{self.rule}"))
        if self.order != DEFAULT_ORDER:
            parts.append(f"order={self.order}")
        return ",".join(parts) or "tp=1"

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["stages"] = list(self.stages) if self.stages is not None else None
        return plain

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """Expert data parallel degree: ranks that hold the same expert shard."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @cached_property
    def dense(self) -> dict[str, npt.NDArray[np.int64]]:
        """Coordinates of every rank on the dense mesh: `tp, cp, dp, pp`, and `shard`, its index among `cp x dp`."""
        mesh = self._coordinates(self._dense_sizes)
        del mesh["ep"]
        index = np.zeros(self.world, np.int64)
        scale = 1
        for axis in self.order.split("-"):
            if axis in ("cp", "dp"):
                index += mesh[axis] * scale
                scale *= self._dense_sizes[axis]
        mesh["shard"] = index
        return mesh

    @cached_property
    def expert(self) -> dict[str, npt.NDArray[np.int64]]:
        """Coordinates of every rank on the expert mesh: `etp, ep, edp, pp`, and `shard`, its index in `edp`."""
        mesh = self._coordinates(self._expert_sizes)
        return {"etp": mesh["tp"], "ep": mesh["ep"], "edp": mesh["dp"], "pp": mesh["pp"], "shard": mesh["dp"]}

    @property
    def _dense_sizes(self) -> dict[str, int]:
        return {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}

    @property
    def _expert_sizes(self) -> dict[str, int]:
        return {"tp": self.etp, "cp": 1, "ep": self.ep, "dp": self.edp, "pp": self.pp}

    def _faster_than_pp(self, sizes: dict[str, int]) -> int:
        """Ranks from one pipeline stage to the next."""
        axes = self.order.split("-")
        return prod(sizes[axis] for axis in axes[: axes.index("pp")])

    def _coordinates(self, sizes: dict[str, int]) -> dict[str, npt.NDArray[np.int64]]:
        rest = np.arange(self.world, dtype=np.int64)
        mesh = {}
        for axis in self.order.split("-"):
            rest, mesh[axis] = np.divmod(rest, sizes[axis])
        return mesh

    def coordinate(self, rank: int) -> dict[str, int]:
        """The mesh coordinate of one rank, as extras are keyed by it."""
        return {axis: int(self.dense[axis][rank]) for axis in ("tp", "pp", "cp", "dp")}

    def with_stages(self, layers: int) -> "Layout":
        """This layout with its stage sizes written out where an even split does not fit `layers`.

        Raises:
            LayoutError: the stage sizes do not add up to `layers`, or vpp does not divide them.
        """
        if self.stages is not None:
            if sum(self.stages) != layers:
                raise LayoutError(
                    f"layout {self}: stage sizes add up to {sum(self.stages)}, the model has {layers} layers"
                )
            return self
        if self.vpp > 1 and layers % (self.pp * self.vpp):
            raise LayoutError(
                f"layout {self}: pp*vpp = {self.pp * self.vpp} must divide the model's {layers} layers"
            )
        if self.vpp > 1 or layers % self.pp == 0:
            return self
        few, more = divmod(layers, self.pp)
        return replace(self, stages=tuple(few + (stage < more) for stage in range(self.pp)))

    def stage_of_layers(self, layers: int) -> npt.NDArray[np.int64]:
        """The pipeline stage of each layer; chunks of one stage are interleaved when `vpp` > 1."""
        full = self.with_stages(layers)
        if full.stages is not None:
            return np.repeat(np.arange(self.pp, dtype=np.int64), full.stages)
        chunk = np.arange(layers, dtype=np.int64) // max(1, layers // (self.pp * self.vpp))
        return chunk % self.pp
