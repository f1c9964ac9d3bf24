"""Verification: is a checkpoint whole, and do its bytes say what they said when it was written."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckptkit.core.dtypes import DType
from ckptkit.core.layouts import Layout
from ckptkit.core.plan import Key, Plan
from ckptkit.errors import CkptError, CorruptionError, LayoutError, StoreError, UsageError
from ckptkit.ops.checks import check_complete
from ckptkit.ops.checksums import check_sums
from ckptkit.ops.digesting import Fault, check_leaves, structure_fault
from ckptkit.ops.equality import common, unequal
from ckptkit.ops.fingerprinting import stored
from ckptkit.ops.reports import Progress, Report, count_text, nbytes_text
from ckptkit.ops.sources import Source, open
from ckptkit.ops.streaming import compare_replicas, only_roles, prove

__all__ = ["Fault", "VerifyReport", "check_bytes", "verify"]


@dataclass
class VerifyReport(Report):
    """What was checked, what was found, and what was not checked.

    Attributes:
        faults: Everything that is wrong, at most `limit` of each kind; `fault_count` counts all.
        checked, not_checked: Sentences for people.
        leaves, leaves_checked, bytes_checked: Digests there are, and were compared.
        against: The other checkpoint, empty without one; `elements_compared` elements were bitwise equal to it.
        exit_code: 0, or 1 with faults.
    """

    url: str
    format: str = ""
    layout: str = ""
    against: str = ""
    faults: list[Fault] = field(default_factory=list)
    fault_count: int = 0
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    leaves: int = 0
    leaves_checked: int = 0
    bytes_checked: int = 0
    elements_compared: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    _limit: int = 20

    @property
    def exit_code(self) -> int:
        return 1 if self.fault_count else 0

    def add(self, faults: Iterable[Fault]) -> None:
        """Count faults, and list them up to the limit of their kind."""
        for fault in faults:
            self.fault_count += 1
            if sum(listed.kind == fault.kind for listed in self.faults) < self._limit:
                self.faults.append(fault)

    def summary(self) -> str:
        head = f"{self.url}: {count_text(self.fault_count, 'fault') if self.fault_count else 'no fault'}"
        lines = [f"  {fault.kind}: {fault.what}" for fault in self.faults]
        lines += [f"  checked: {text}" for text in self.checked]
        lines += [f"  not checked: {text}" for text in self.not_checked]
        return "\n".join([head, *lines])


def verify(
    url: str,
    *,
    quick: bool = False,
    sample: float | None = None,
    against: str | None = None,
    bitwise: bool = False,
    format: str | None = None,
    layout: str | Layout | None = None,
    model: str | None = None,
    config: str | Mapping[str, Any] | None = None,
    threads: int | None = None,
    memory: int = 256 << 20,
    limit: int = 20,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a checkpoint: structure, coverage, every leaf's digest, replicas, and masters against parameters.

    Args:
        quick: Structure and coverage only: headers, sizes, manifest.
        sample: Share of leaves to read, in (0, 1]; which ones is random and differs from call to call.
        against: Another checkpoint, of any layout and format: canonical tensors that both hold must be bitwise equal,
            and both must hold the same weights. State that the other has none of is named as not checked. Tensors whose
            fingerprints both sides store are compared by these, and no byte of them moves.
        bitwise: With `against`: read both sides also where fingerprints would do.
        limit: Faults listed of each kind.

    Raises:
        UsageError: `quick` and `sample` together, or a sample outside (0, 1].
        StoreError: there is nothing at `url`. A broken checkpoint is a report with faults, not an exception.
    """
    if quick and sample is not None:
        raise UsageError("--quick reads no leaf and --sample some: give one of them")
    if sample is not None and not 0 < sample <= 1:
        raise UsageError(f"--sample {sample}: give a share above 0 and at most 1 (100%)")
    if bitwise and against is None:
        raise UsageError("--bitwise says how --against compares: give both")
    began = time.monotonic()
    report = VerifyReport(url, _limit=limit)
    other = open(against, model=model, config=config) if against is not None else None
    try:
        source = open(url, format=format, layout=layout, model=model, config=config)
    except (StoreError, UsageError, LayoutError):
        raise
    except CkptError as error:
        report.add([structure_fault(error)])
        report.not_checked.append("everything behind that: the checkpoint cannot be opened")
        report.seconds = time.monotonic() - began
        return report
    catalog = source.catalog
    report.url, report.format = source.url, catalog.format
    report.layout = str(catalog.layout) if catalog.layout is not None else ""
    report.notes += [*source.notes, *catalog.facts.get("warnings", ())]
    proof = _structure(source, report)
    sound = proof is not None
    if quick:
        report.not_checked.append("the bytes of tensors (--quick)")
    else:
        _digests(source, report, sample, threads, progress)
        if proof is not None:
            _replicas(source, proof, report, threads)
        if not sound:
            report.not_checked.append("masters against parameters: the tensors are not all there")
        elif sample is not None:
            report.not_checked.append("masters against parameters (--sample)")
        else:
            _masters(source, report, threads, memory, progress)
    if other is not None and sound:
        report.against = other.url
        _compare(source, other, report, threads, memory, progress, bitwise=bitwise)
    report.seconds = time.monotonic() - began
    return report


def check_bytes(path: str, *, progress: Progress | None = None) -> list[str]:
    """What is wrong with a checkpoint that opens, from its digests alone; empty where nothing is, or where it has none."""
    source = open(path)
    assert source.format is not None
    faults = [structure_fault(error) for error in source.format.problems(source.store, source.catalog)]
    faults += check_leaves(source.store, source.catalog, progress=progress).faults
    faults += check_sums(source.store, source.checksums).faults
    return [fault.what for fault in faults]


def _structure(source: Source, report: VerifyReport) -> Plan | None:
    """Everything but the bytes of tensors. Returns the proof that all tensors are covered, or None where they are not."""
    assert source.format is not None
    problems = [structure_fault(error) for error in source.format.problems(source.store, source.catalog)]
    report.add(problems)
    catalog = source.catalog
    report.checked.append(f"headers, sizes and names of {count_text(len(catalog.files), 'file')}")
    try:
        proof = prove(source)
    except CkptError as error:
        report.add([Fault("coverage", str(error), tensor=str(error.facts.get("tensor", "")))])
        return None
    try:
        check_complete(source)
    except CkptError as error:
        what = "coverage" if not problems else "structure"
        report.add([Fault(what, str(error), tensor=str(error.facts.get("tensor", "")))])
        return None
    tensors = count_text(len({name for name, _ in catalog.held}), "tensor")
    report.checked.append(f"coverage: every one of {proof.elements:,} elements of {tensors} lies somewhere")
    if catalog.model is None:
        report.not_checked.append(
            "whether all tensors of the model are there: no schema fits its configuration"
        )
    return proof


def _digests(
    source: Source, report: VerifyReport, sample: float | None, threads: int | None, progress: Progress | None
) -> None:
    catalog = source.catalog
    if catalog.leaves is None and source.format is not None:
        stated = check_sums(source.store, source.checksums, share=sample or 1.0, threads=threads)
        report.add(stated.faults)
        report.bytes_checked = stated.nbytes
        if stated.checked:
            report.checked.append(
                f"CRC-32 of {stated.checked:,} of {stated.leaves:,} members of zips ({nbytes_text(stated.nbytes)})"
            )
            return
    if catalog.leaves is None:
        report.not_checked.append(
            f"bytes against digests: {catalog.format} has none, so that a changed byte cannot be told from a written one"
        )
        return
    found = check_leaves(source.store, catalog, share=sample or 1.0, threads=threads, progress=progress)
    report.add(found.faults)
    report.leaves, report.leaves_checked, report.bytes_checked = found.leaves, found.checked, found.nbytes
    report.checked.append(
        f"digests of {found.checked:,} of {found.leaves:,} leaves ({nbytes_text(found.nbytes)})"
    )
    if found.checked < found.leaves:
        report.not_checked.append(f"{found.leaves - found.checked:,} leaves (--sample)")


def _replicas(source: Source, proof: Plan, report: VerifyReport, threads: int | None) -> None:
    """Pieces that hold the same elements hold the same bytes."""
    pairs = len(proof.replicas[0])
    if not pairs:
        return
    try:
        nbytes = compare_replicas(source, proof, threads)
    except CorruptionError as error:
        report.add([Fault("replica", str(error), str(error.facts.get("file", "")))])
        report.not_checked.append("replicas beyond the first two that differ")
    else:
        report.checked.append(
            f"replicas: {count_text(pairs, 'pair')} of equal pieces ({nbytes_text(nbytes)})"
        )


def _masters(
    source: Source, report: VerifyReport, threads: int | None, memory: int, progress: Progress | None
) -> None:
    """Where a tensor has a parameter and a master copy, the parameter is the master rounded."""
    held = source.catalog.held
    wanted = {key: dtype for key, dtype in held.items() if key[1] == "param" and (key[0], "master") in held}
    if not wanted:
        return
    sides = [only_roles(source, ("param",)), only_roles(source, ("master",))]
    found = unequal(sides, wanted, threads, memory, progress, nan_equals_nan=True)
    for (tensor, _), (count, at) in found.items():
        what = (
            f"{tensor}: {count:,} of {prod(source.catalog.tensors[tensor].shape):,} elements of the parameter are not its "
            f"master rounded to {wanted[tensor, 'param']}, first at {at}"
        )
        report.add([Fault("master", what, tensor=tensor, box=str(at))])
    report.checked.append(f"parameters are their masters rounded ({count_text(len(wanted), 'tensor')})")


def _compare(
    source: Source,
    other: Source,
    report: VerifyReport,
    threads: int | None,
    memory: int,
    progress: Progress | None,
    *,
    bitwise: bool,
) -> None:
    """Equality of all that both hold, and that both hold the same: by stored fingerprints, else bit by bit."""
    ours, theirs = source.catalog, other.catalog
    wanted, faults, skipped = common(source, other)
    report.add(faults)
    report.not_checked += skipped
    alike, apart = ({}, set()) if bitwise else _by_fingerprint(source, other, wanted)
    compared = {key: dtype for key, dtype in wanted.items() if key not in alike}
    found = unequal([source, other], compared, threads, memory, progress)
    for tensor, role in sorted(apart - found.keys()):
        what = f"{tensor}/{role} is equal in both, but one of the two stores a wrong fingerprint of it"
        report.add([Fault("against", what, tensor=tensor)])
    for (tensor, role), (count, at) in found.items():
        size = prod(ours.tensors[tensor].shape)
        what = f"{tensor}/{role}: {count:,} of {size:,} elements differ from {other.url}, first at {at}"
        report.add([Fault("against", what, tensor=tensor, box=str(at))])
    report.elements_compared = sum(prod(ours.tensors[name].shape) for name, _ in wanted)
    for keys, how in ((alike, "by fingerprint"), (compared, "bitwise")):
        if keys:
            elements = sum(prod(ours.tensors[name].shape) for name, _ in keys)
            report.checked.append(
                f"{how} against {other.url} ({theirs.format}): {elements:,} elements of {count_text(len(keys), 'array')}"
            )
    if alike:
        report.not_checked.append(
            f"whether {other.url} still has the bytes that its fingerprints are of: verify it alone, or give --bitwise"
        )


def _by_fingerprint(
    source: Source, other: Source, wanted: Mapping[Key, DType]
) -> tuple[dict[Key, DType], set[Key]]:
    """Keys whose fingerprints both sides store: those that are equal, and those that are not."""
    ours, theirs = stored(source), stored(other)
    alike: dict[Key, DType] = {}
    apart: set[Key] = set()
    for key, dtype in wanted.items():
        axes = source.catalog.tensors[key[0]].axes, other.catalog.tensors[key[0]].axes
        if key in ours and key in theirs and axes[0] == axes[1]:
            if ours[key] == theirs[key]:
                alike[key] = dtype
            else:
                apart.add(key)
    return alike, apart
