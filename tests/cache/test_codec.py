"""Messages and records in JSON: what was written is read again, anything else is refused by name."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.cache.codec import MessageError, decode, encode
from ckptkit.cache.events import Join
from ckptkit.cache.messages import (
    TO_COORDINATOR,
    TO_NODE,
    Ban,
    Bans,
    CoordinatorRecord,
    Epoch,
    Holding,
    Inventory,
    Mark,
    Member,
    Offer,
    Owner,
    Poll,
    Record,
    RestoreDecision,
    Sealed,
    Shard,
    SlotRecord,
    Version,
    Vote,
)  # fmt: skip

INC, DIGEST = "a0" * 16, "0f" * 16
V = Version(3, 7, INC)
SHARD = Shard(V, 1, 4, DIGEST, 1 << 40, DIGEST)
EPOCH = Epoch(
    3, INC, tuple(Member(rank, f"node-{rank // 2}", f"host{rank // 2}:8000", "rack") for rank in range(4))
)

EXAMPLES = [
    Vote(3, INC, "node-0", 7, DIGEST, (Sealed(0, DIGEST), Sealed(1, DIGEST))),
    Vote(3, INC, "node-0", 7, refusal="no free slot"),
    Holding(3, INC, "node-0", V, (Sealed(0, DIGEST),)),
    Poll(3, INC, "node-0", 0, 2),
    Offer(3, INC, "node-0", SHARD),
    Record(3, INC, 9, V, V, None, V, aborted=(8, 9), bans=Bans((Ban(1, 2, 3, 4),), (Mark(V, 2),))),
    RestoreDecision(
        3, INC, 1, V, 2, DIGEST, (("node-0", "@durable"), ("n",)), (DIGEST, DIGEST), V, (V,), ("why",), ""
    ),
    Inventory("node-0", (SHARD, SHARD), 1, epoch=3, inc=INC, committed=(V,)),
    SlotRecord(3, "own/12", "WRITING", 5, V, 1, 4, DIGEST, 17, "", Owner(12, 34), True, bitmap="ff01"),
    CoordinatorRecord(3, INC, RestoreDecision(3, INC, 1), Record(3, INC, 1)),
    Join(EPOCH, 1, 1, 1 << 30),
    EPOCH,
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_what_was_written_is_read_again(message: Any) -> None:
    assert decode(encode(message), type(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_field_is_checked(message: Any) -> None:
    """No field takes another type, and none an unknown neighbor."""
    good = json.loads(encode(message))
    bad: Any
    for name in good:
        for bad in (object, 1.5, [[]], {"x": 1}, "../../etc/passwd", "\x00", -(10**30), 10**30):
            changed = dict(good)
            changed[name] = {"unexpected": [None]} if bad is object else bad
            if isinstance(bad, str) and name in ("refusal", "error"):
                continue  # free text, shown to people only
            if (name, bad) == ("sources", [[]]):
                continue  # a shard without a place: wrong only beside the rest
            with pytest.raises(MessageError):
                decode(json.dumps(changed).encode(), type(message))
    with pytest.raises(MessageError, match="unknown field 'path'"):
        decode(json.dumps(good | {"path": "/tmp"}).encode(), type(message))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no JSON"), (b"[]", "no JSON object"), (b"{", "no JSON"), (b"\xff\xfe", "no JSON"),
        (b'{"type":"Poll"}', "lacks"), (b'{"type":"os.system"}', "expected"), (b'{"type":["Poll"]}', "expected"),
        (b'{"type":"Poll","type":"Poll"}', "twice"), (b'{"type":"Poll","epoch":NaN}', "NaN"),
        (b"[" * 100_000, "no JSON"), (b'{"type":"Poll","epoch":true}', "lacks"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        decode(data, Poll)


def test_a_long_message_is_not_even_parsed() -> None:
    with pytest.raises(MessageError, match="at most 100"):
        decode(b" " * 101, Poll, limit=100)


@pytest.mark.parametrize("name", ["", "@durable", "a/b", "..", "-x", "a" * 129, "ä", "a\n", "a b"])
def test_a_node_cannot_have_a_name_that_is_more_than_a_name(name: str) -> None:
    data = json.loads(encode(Poll(3, INC, "n", 0, 0))) | {"node": name}

    with pytest.raises(MessageError, match="node"):
        decode(json.dumps(data).encode(), Poll)


def test_fields_that_a_sender_of_the_version_before_lacks_have_defaults() -> None:
    old = json.loads(encode(Record(3, INC, 1, V)))
    for name in ("degraded", "bans", "floor"):
        del old[name]

    assert decode(json.dumps(old).encode(), Record) == Record(3, INC, 1, V)


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "epoch", "inc", "node", "step"]), inner),
    max_leaves=12,
))  # fmt: skip
def test_any_json_is_a_message_or_refused(value: Any) -> None:
    with suppress(MessageError):
        decode(json.dumps(value).encode(), *TO_NODE, *TO_COORDINATOR)


def test_an_epoch_says_what_is_wrong_with_it() -> None:
    assert EPOCH.problem == ""
    assert "in order" in Epoch(1, INC, ()).problem
    assert "in order" in Epoch(1, INC, (Member(1, "n", "h:1"),)).problem
    assert "two addresses" in Epoch(1, INC, (Member(0, "n", "h:1"), Member(1, "n", "h:2"))).problem
