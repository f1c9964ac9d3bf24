"""Core against arrays that are really made: what ranks hold, what plans copy, and what plans refuse."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from ckptkit.core.catalog import ROLES, Catalog
from ckptkit.core.copies import copies_into, replica_pairs
from ckptkit.core.layouts import Layout
from ckptkit.core.plan import make_plan
from ckptkit.core.shards import shards
from ckptkit.errors import CoverageError, LayoutError
from tests.core.drawing import layouts, toys
from tests.core.filling import UNSET, by_pieces, carry_out, entry_bytes, place
from tests.core.oracle import Impossible, Toy, World

EXAMPLES = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def world_of(data: st.DataObject, toy: Toy) -> World | None:
    """A random layout of a random family, or None where the oracle says it does not fit."""
    layout, family = data.draw(layouts(toy.layers)), data.draw(st.sampled_from(toy.families))
    try:
        return World(toy, family, layout)
    except Impossible:
        with pytest.raises(LayoutError):
            catalog_of(toy, family.name, layout)
        return None


def catalog_of(toy: Toy, family: str, layout: Layout) -> Catalog:
    model = toy.model
    return shards(model.names(family), layout, toy.held, model.tensors)


def fill(catalog: Catalog, world: World) -> list[np.ndarray]:
    """The files of a catalog by the oracle's arrays. Padding holds UNSET, so that nothing depends on it."""
    files = place(catalog)
    entries = catalog.entries
    for entry in range(len(entries)):
        key, role = catalog.locals[entries.local[entry]].key, ROLES[entries.role[entry]]
        array = world.array(catalog.files[entries.file[entry]].rank, key, role).reshape(-1)
        run = array[entries.first[entry] : entries.last[entry]]
        bytes_ = entry_bytes(catalog, files, entry)
        bytes_[:] = run.view(np.uint8)
        bytes_.reshape(len(run), array.itemsize)[run == 0] = UNSET
    return files


@EXAMPLES
@given(toys(), st.data())
def test_every_rank_holds_what_brute_force_says(toy: Toy, data: st.DataObject) -> None:
    """Local tensors, their ranks, ZeRO runs and piece maps agree with arrays made by slicing and joining."""
    world = world_of(data, toy)
    assume(world is not None)
    assert world is not None
    model = toy.model
    names = model.names(world.family.name)

    placed: dict[tuple[int, str], tuple[int, ...]] = {}
    for placement in names.placements(world.layout):
        for rank in placement.ranks.tolist():
            assert (rank, placement.local.key) not in placed
            placed[rank, placement.local.key] = placement.local.shape
    expected = {
        (rank, key): world.array(rank, key, next(iter(local.bundle.roles))).shape
        for rank, mine in enumerate(world.ranks)
        for key, local in mine.items()
    }
    assert placed == expected

    catalog = shards(names, world.layout, toy.held, model.tensors)
    files = fill(catalog, world)
    entries = catalog.entries
    covered: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for entry in range(len(entries)):
        local, role = catalog.locals[entries.local[entry]], ROLES[entries.role[entry]]
        rank, first, last = (int(x[entry]) for x in (entries.file, entries.first, entries.last))
        assert local.key in world.ranks[rank]
        assert by_pieces(catalog, entry, toy.truth).tobytes() == entry_bytes(catalog, files, entry).tobytes()
        if world.is_cut(role) and local.size:
            assert (local.key, first, last) in world.runs(rank, role)
        covered.setdefault((int(entries.local[entry]), role), []).append((first, last))
    for number, local in enumerate(catalog.locals):
        bundle = next(mine[local.key].bundle for mine in world.ranks if local.key in mine)
        for role in bundle.roles:
            runs = sorted(covered.pop((number, role)))
            edges = [runs[0][0], *(last for _, last in runs)]
            assert edges[0] == 0 and edges[-1] == local.size
            assert [first for first, _ in runs] == edges[:-1], "runs of a local tensor tile it"
    assert not covered


@EXAMPLES
@given(toys(), st.data())
def test_copies_of_a_plan_rebuild_any_layout_from_any_other(toy: Toy, data: st.DataObject) -> None:
    """Between two layouts and families, both ways: every element arrives, once, bit for bit; padding stays untouched."""
    a, b = world_of(data, toy), world_of(data, toy)
    assume(a is not None and b is not None)
    assert a is not None and b is not None
    for one, other in ((a, b), (b, a)):
        source = catalog_of(toy, one.family.name, one.layout)
        destination = catalog_of(toy, other.family.name, other.layout)
        given_, expected = fill(source, one), fill(destination, other)
        made = place(destination)

        plan = make_plan(source, destination)
        written = carry_out(copies_into(plan), given_, made)

        assert [file.tobytes() for file in made] == [file.tobytes() for file in expected]
        assert all(file.max(initial=0) <= 1 for file in written)
        assert not plan.drops and not plan.casts and plan.lossless
        assert plan.elements == int(destination.pieces.volume.sum())
        event(f"replicas: {len(plan.replicas[0]) > 0}")
        same = [file.copy() for file in given_]
        carry_out(replica_pairs(plan), given_, same)
        assert [file.tobytes() for file in same] == [file.tobytes() for file in given_]


@EXAMPLES
@given(toys(), st.data())
def test_copies_of_some_files_are_those_of_all_files(toy: Toy, data: st.DataObject) -> None:
    """Asking file by file gives each copy once, in the order of its file."""
    a, b = world_of(data, toy), world_of(data, toy)
    assume(a is not None and b is not None)
    assert a is not None and b is not None
    source, destination = (catalog_of(toy, w.family.name, w.layout) for w in (a, b))
    place(source), place(destination)
    plan = make_plan(source, destination)
    every = copies_into(plan)

    apart = [copies_into(plan, np.asarray([file])) for file in range(len(destination.files))]

    assert sum(map(len, apart)) == len(every)
    assert np.array_equal(np.concatenate([c.dst for c in apart]), every.dst)
    assert np.array_equal(np.concatenate([c.dst_file for c in apart]), every.dst_file)
    some = data.draw(st.lists(st.integers(0, len(destination.files) - 1), unique=True))
    chosen = copies_into(plan, np.asarray(some, np.int64))
    assert chosen.dst.tolist() == every.dst[np.isin(every.dst_file, some)].tolist()


def holds(catalog: Catalog, toy: Toy) -> dict[tuple[str, str], np.ndarray]:
    """For every tensor and role, which elements a catalog has a piece of."""
    found = {key: np.zeros(array.shape, bool) for key, array in toy.truth.items()}
    pieces = catalog.pieces
    for piece in range(len(pieces)):
        tensor = catalog.tensor_list[catalog.segments.tensor[pieces.segment[piece]]]
        axes = len(tensor.shape)
        box = tuple(
            slice(a, b) for a, b in zip(pieces.lo[piece, :axes], pieces.hi[piece, :axes], strict=True)
        )
        found[tensor.name, ROLES[catalog.entries.role[pieces.entry[piece]]]][box] = True
    return found


@EXAMPLES
@given(toys(), st.data())
def test_a_source_that_lost_an_element_is_refused_by_name(toy: Toy, data: st.DataObject) -> None:
    """Whichever entry is removed or shortened: the plan names a tensor that is not whole, or there was a replica."""
    a, b = world_of(data, toy), world_of(data, toy)
    assume(a is not None and b is not None)
    assert a is not None and b is not None
    source = catalog_of(toy, a.family.name, a.layout)
    destination = catalog_of(toy, b.family.name, b.layout)
    entries = source.entries
    assume(len(entries) > 0)
    entry = data.draw(st.integers(0, len(entries) - 1))
    how = data.draw(st.sampled_from(["remove", "first", "last"]))
    if how == "remove" or entries.first[entry] == entries.last[entry]:
        source.entries = entries.take(np.delete(np.arange(len(entries)), entry))
    else:
        (entries.first if how == "first" else entries.last)[entry] += 1 if how == "first" else -1
    lost = {key for key, held in holds(source, toy).items() if not held.all() or key not in source.held}
    # A parameter that is gone altogether is made from its master copy.
    lost -= {
        (t, r) for t, r in lost if r == "param" and (t, r) not in source.held and (t, "master") in source.held
    }
    event(f"lost: {len(lost) > 0}")

    if not lost:
        make_plan(source, destination)
        return
    with pytest.raises(CoverageError) as caught:
        make_plan(source, destination)

    assert caught.value.tensor in {tensor for tensor, _ in lost}
    assert caught.value.tensor in str(caught.value)


@EXAMPLES
@given(toys(), st.data())
def test_what_a_destination_has_no_room_for_is_listed(toy: Toy, data: st.DataObject) -> None:
    """A destination that leaves entries out gives drops, exactly of the elements that no other entry holds."""
    a, b = world_of(data, toy), world_of(data, toy)
    assume(a is not None and b is not None)
    assert a is not None and b is not None
    source = catalog_of(toy, a.family.name, a.layout)
    destination = catalog_of(toy, b.family.name, b.layout)
    keep = np.asarray(
        data.draw(
            st.lists(st.booleans(), min_size=len(destination.entries), max_size=len(destination.entries))
        ),
        bool,
    )
    destination.entries = destination.entries.take(np.flatnonzero(keep))

    plan = make_plan(source, destination)

    expected = {
        key: int((~held).sum()) * toy.truth[key].itemsize
        for key, held in holds(destination, toy).items()
        if not held.all() or key not in destination.held
    }
    assert {(d.tensor, d.role): d.nbytes for d in plan.drops} == expected
