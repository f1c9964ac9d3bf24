"""Extras: what is no tensor of the model, as JSON and back. Nothing is pickled.

Schedulers, loaders and other objects with `state_dict` give plain values: numbers, text, lists, dicts, small tensors and arrays.
What JSON lacks is written as the formats' own plain values are (`ckptkit.formats.plain`).
"""

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckptkit.core.dtypes import BY_NAME
from ckptkit.errors import CkptError, FormatError, UsageError
from ckptkit.formats.plain import TensorValue, from_plain, to_plain
from ckptkit.hooks.holdings import dtype_of

MOST = 16 << 20
"""Most bytes of a tensor in extras; larger ones belong among the registered tensors."""


def pack_value(value: Any, what: str) -> Any:
    """A state as JSON.

    Raises UsageError where a part of it is no plain value; names its place.
    """
    try:
        return to_plain(_ours(value, what), lambda tensor: b"")
    except FormatError as error:
        raise UsageError(f"{what}: {error}. Its state_dict must hold plain values") from None


def unpack_value(value: Any) -> Any:
    """The state that `pack_value` made JSON of; arrays come back as tensors, unless they were numpy's."""
    return _theirs(from_plain(value))


def _ours(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value, where)
    if isinstance(value, np.ndarray):
        return {"__numpy__": _tensor(torch.from_numpy(np.ascontiguousarray(value)), where)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {_ours(k, where): _ours(v, f"{where}[{k!r}]") for k, v in value.items()}
    if isinstance(value, list):
        return [_ours(item, f"{where}[{k}]") for k, item in enumerate(value)]
    if isinstance(value, tuple):
        return tuple(_ours(item, f"{where}[{k}]") for k, item in enumerate(value))
    if isinstance(value, set | frozenset):
        return type(value)(_ours(item, where) for item in value)
    raise UsageError(
        f"{where} is a {type(value).__name__}, which is no plain value; checkpoints hold numbers, text, lists, dicts and tensors only"
    )


def _tensor(value: torch.Tensor, where: str) -> TensorValue:
    if value.numel() * value.element_size() > MOST:
        raise UsageError(
            f"{where} is a tensor of {value.numel() * value.element_size():,} bytes; register it with tensors=, extras are small"
        )
    data = value.detach().cpu().contiguous()
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return TensorValue(dtype_of(data.dtype, where), tuple(data.shape), raw)


def _theirs(value: Any) -> Any:
    if isinstance(value, TensorValue):
        return _torch(value)
    if isinstance(value, dict):
        if value.keys() == {"__numpy__"}:
            return _torch(value["__numpy__"]).numpy()
        return {k: _theirs(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_theirs(item) for item in value)
    return value


def _torch(value: TensorValue) -> torch.Tensor:
    dtype = getattr(torch, BY_NAME[value.dtype.name].name)
    if not value.data:
        return torch.empty(value.shape, dtype=dtype)
    return torch.frombuffer(bytearray(value.data), dtype=torch.uint8).view(dtype).reshape(value.shape)


def rng_state(device: torch.device | None) -> dict[str, Any]:
    """The random generators of this process, as JSON."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, at, has, cached = np.random.get_state(legacy=True)
        state["numpy"] = {"kind": kind, "keys": keys, "at": at, "has": has, "cached": cached}
    if device is not None and device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(plain: Any, device: torch.device | None) -> None:
    """Set the random generators. Raises FormatError where the state does not make sense."""
    try:
        state = unpack_value(plain)
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            found = state["numpy"]
            np.random.set_state((found["kind"], found["keys"], found["at"], found["has"], found["cached"]))
        if "device" in state and device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(state["device"], device)
    except CkptError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(
            f"the saved state of the random generators does not make sense: {error!r}"
        ) from error


def seed_all(seed: int, step: int, coordinate: str) -> None:
    """Seed the random generators from (seed, step, coordinate): for a rank whose stream was not saved."""
    import xxhash

    number = xxhash.xxh3_64_intdigest(f"{seed}/{step}/{coordinate}".encode())
    random.seed(number)
    np.random.seed(number % (1 << 32))
    torch.manual_seed(number % (1 << 63))


def state_of(thing: Any, what: str) -> Any:
    """An object's state as JSON. Raises UsageError where it has no `state_dict`, or one of other than plain values."""
    make = getattr(thing, "state_dict", None)
    if not callable(make):
        raise UsageError(f"{what} is a {type(thing).__name__} without state_dict and load_state_dict")
    return pack_value(make(), what)


def load_state(thing: Any, plain: Any, what: str) -> None:
    """Give an object its state. Raises FormatError that names it where it refuses."""
    try:
        thing.load_state_dict(unpack_value(plain))
    except CkptError:
        raise
    except Exception as error:
        raise FormatError(
            f"{what} ({type(thing).__name__}) does not take its saved state: {error!r}"
        ) from error
