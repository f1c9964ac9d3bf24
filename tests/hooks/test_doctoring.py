"""The doctor on made-up machines and on this one; the self-test of copies."""

from pathlib import Path

from ckptkit.hooks import doctoring, selftest


def machine(root: Path, **files: str) -> Path:
    """A tree with some of `proc` and `sys`; `__` stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    return root


def found(root: Path) -> dict[str, doctoring.Finding]:
    return {finding.name: finding for finding in doctoring.memory(root)}


def test_what_the_kernel_does_to_memory_is_said(tmp_path: Path) -> None:
    """NUMA balancing, huge pages of shared memory, a small cgroup, swap: each a warning with a reason."""
    root = machine(
        tmp_path, proc__sys__kernel__numa_balancing="1\n", sys__kernel__mm__transparent_hugepage__shmem_enabled="[always] never\n",
        proc__self__cgroup="0::/job\n", sys__fs__cgroup__job__placeholder="",
        proc__meminfo="MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\nSwapTotal: 1000000 kB\n",
    )  # fmt: skip
    (root / "sys/fs/cgroup/job/memory.max").write_text("8000000000\n")

    lines = found(root)

    for name in ("NUMA balancing", "huge pages of shared memory", "cgroup memory", "swap"):
        assert lines[name].state == "warning" and lines[name].why, name


def test_a_quiet_machine_has_no_warning(tmp_path: Path) -> None:
    """The same settings the other way."""
    root = machine(
        tmp_path, proc__sys__kernel__numa_balancing="0", sys__kernel__mm__transparent_hugepage__shmem_enabled="always [never]",
        proc__meminfo="MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\nSwapTotal: 0 kB\n",
    )  # fmt: skip

    assert {finding.state for name, finding in found(root).items() if name != "/dev/shm"} == {"ok"}


def test_a_url_is_tried(tmp_path: Path) -> None:
    """One that can be written is ok and nothing is left there; one that cannot is a fault."""
    (tmp_path / "file").write_text("")

    good = {f.name: f for f in doctoring.examine(str(tmp_path / "run"))}["url"]
    bad = {f.name: f for f in doctoring.examine(str(tmp_path / "file" / "run"))}["url"]

    assert good.state == "ok" and not list((tmp_path / "run").iterdir())
    assert bad.state == "fault" and "file" in bad.value


def test_copies_of_a_snapshot_are_right_here() -> None:
    """On a CPU: every way that runs is right; those that need a device say so."""
    measures = selftest.run("cpu")

    assert {m.passed for m in measures} == {True, None}
    assert {m.name for m in measures if m.passed} >= {"snapshot, all", "restore, digests checked"}
