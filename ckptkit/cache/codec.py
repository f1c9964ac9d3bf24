"""Strict JSON for messages and records: what does not fit the dataclass exactly is refused.

A message is a frozen dataclass whose hints say everything: `int` and `str` carry their bounds in `Annotated`, tuples their
greatest length. `decode` builds one from bytes of a stranger; there is no way to name a path, a class or code in it.

>>> @message
... class Knock:
...     step: Annotated[int, Between(0, 9)]
>>> encode(Knock(3))
b'{"type":"Knock","step":3}'
>>> decode(b'{"type":"Knock","step":10}', Knock)
Traceback (most recent call last):
ckptkit.cache.codec.MessageError: Knock.step is 10; it must be 0 to 9
"""

import json
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, lru_cache
from typing import (
    Annotated,
    Any,
    NoReturn,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from ckptkit.errors import FormatError

MAX_BODY = 8 << 20

T = TypeVar("T")
_MESSAGES: set[type] = set()


class MessageError(FormatError):
    """A message or record that does not say what its type demands; nothing was done about it."""


@dataclass(frozen=True, slots=True)
class Between:
    """Bounds of an integer, both included."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Matching:
    """A regular expression that the whole text must match, and what to call it."""

    pattern: str
    name: str


@dataclass(frozen=True, slots=True)
class AtMost:
    """The greatest number of items of a tuple, or of characters of a text."""

    items: int


@dataclass_transform(frozen_default=True)
def message(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass, which `encode` and `decode` know by its name."""
    made = dataclass(frozen=True, slots=True)(cls)
    _MESSAGES.add(made)
    return made


def encode(value: Any) -> bytes:
    """The JSON of a message, with its type's name."""
    kind: Any = type(value)
    parts = [
        f'"type":"{kind.__name__}"',
        *(f'"{name}":{_text(getattr(value, name))}' for name in _names(kind)),
    ]
    return f"{{{','.join(parts)}}}".encode()


def decode(data: bytes, *allowed: type[T], limit: int = MAX_BODY) -> T:
    """The message in `data`, which must be one of the `allowed` types.

    Fields with a default may be absent, so that a sender of the version before is understood; unknown ones are refused.

    Raises:
        MessageError: too long, no JSON, another type, a field missing, unknown, of a wrong type or out of its bounds.
    """
    if len(data) > limit:
        raise MessageError(f"a message of {len(data)} bytes; at most {limit} are read")
    try:
        found = json.loads(data, object_pairs_hook=_once, parse_constant=_no_constant)
    except MessageError:
        raise
    except (ValueError, RecursionError) as error:
        raise MessageError(f"a message that is no JSON: {str(error)[:80]}") from None
    if not isinstance(found, dict):
        raise MessageError("a message that is no JSON object")
    name = found.pop("type", None)
    for cls in allowed:
        if name == cls.__name__:
            return build(cls, found)
    known = ", ".join(sorted(cls.__name__ for cls in allowed))
    raise MessageError(f"a message of type {str(name)[:40]!r}; expected {known}")


def _text(value: Any) -> str:
    return (
        _message_text(value) if type(value) in _MESSAGES else json.dumps(plain(value), separators=(",", ":"))
    )


@lru_cache(maxsize=64)
def _message_text(value: Any) -> str:
    """The JSON of a message inside another one. The large ones (what a restore decided) are stored again and again unchanged."""
    return json.dumps(plain(value), separators=(",", ":"))


def build(cls: type[T], fields: Mapping[str, Any]) -> T:
    """A `cls` from its fields as plain JSON values. Raises MessageError as `decode` does."""
    hint: Any = cls  # a class can be hashed, which mypy doubts
    made: T = _decoder(hint)(fields, cls.__name__)
    return made


def plain(value: Any) -> Any:
    """The JSON values of a message, without its type's name."""
    if is_dataclass(value):
        kind: Any = type(value)
        return {name: plain(getattr(value, name)) for name in _names(kind)}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MessageError("a message that names a field twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise MessageError(f"a message with {name}, which is no JSON")


@cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


Decoder = Callable[[Any, str], Any]


@cache
def _decoder(hint: Any) -> Decoder:
    """A function that checks and builds a value of `hint` from plain JSON; its second argument says where it stands."""
    rules: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        rules = tuple(rest)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        kept = [arg for arg in get_args(hint) if arg is not type(None)]
        assert len(kept) == 1, f"only `X | None` is known, not {hint}"
        inner = _decoder(kept[0])
        return lambda value, at: None if value is None else inner(value, at)
    if origin is tuple:
        return _tuple_decoder(get_args(hint), rules)
    if hint is int:
        return _int_decoder(rules)
    if hint is str:
        return _text_decoder(rules)
    if hint is bool:
        return _bool
    assert is_dataclass(hint), f"no JSON form of {hint}"
    return _object_decoder(hint)


def _bool(value: Any, at: str) -> bool:
    if not isinstance(value, bool):
        raise MessageError(f"{at} is no true or false")
    return value


def _int_decoder(rules: tuple[Any, ...]) -> Decoder:
    (bounds,) = (rule for rule in rules if isinstance(rule, Between))

    def build(value: Any, at: str) -> int:
        if type(value) is not int:
            raise MessageError(f"{at} is no integer")
        if not bounds.low <= value <= bounds.high:
            raise MessageError(f"{at} is {str(value)[:30]}; it must be {bounds.low} to {bounds.high}")
        return value

    return build


def _text_decoder(rules: tuple[Any, ...]) -> Decoder:
    patterns = [(re.compile(rule.pattern), rule.name) for rule in rules if isinstance(rule, Matching)]
    longest = min((rule.items for rule in rules if isinstance(rule, AtMost)), default=256)

    def build(value: Any, at: str) -> str:
        if not isinstance(value, str) or len(value) > longest:
            raise MessageError(f"{at} is no text of at most {longest} characters")
        for pattern, name in patterns:
            if not pattern.fullmatch(value):
                raise MessageError(f"{at} is {value[:40]!r}, which is no {name}")
        return value

    return build


def _tuple_decoder(args: tuple[Any, ...], rules: tuple[Any, ...]) -> Decoder:
    assert len(args) == 2 and args[1] is Ellipsis, "tuples are of one kind of item"
    inner = _decoder(args[0])
    (most,) = (rule.items for rule in rules if isinstance(rule, AtMost))

    def build(value: Any, at: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > most:
            raise MessageError(f"{at} is no list of at most {most} items")
        return tuple(inner(item, f"{at}[{index}]") for index, item in enumerate(value))

    return build


def _object_decoder(cls: Any) -> Decoder:
    hints = get_type_hints(cls, include_extras=True)
    parts = {name: _decoder(hints[name]) for name in _names(cls)}
    needed = {field.name for field in fields(cls) if field.default is MISSING}

    def build(value: Any, at: str) -> Any:
        if not isinstance(value, Mapping):
            raise MessageError(f"{at} is no object")
        if unknown := value.keys() - parts.keys():
            raise MessageError(f"{at} has an unknown field {min(unknown)[:40]!r}")
        if missing := needed - value.keys():
            raise MessageError(f"{at} lacks {min(missing)!r}")
        return cls(**{name: parts[name](item, f"{at}.{name}") for name, item in value.items()})

    return build
