"""Types of options: sizes, shares and layouts, with messages that say what would be right."""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ckptkit.errors import CkptError

if TYPE_CHECKING:
    from ckptkit.core.layouts import Layout

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS |= {
        _letter: 1000**_power,
        f"{_letter}b": 1000**_power,
        f"{_letter}i": 1024**_power,
        f"{_letter}ib": 1024**_power,
    }


class SizeType(click.ParamType):
    """Bytes: `256MiB`, `5GB`, `1.5G`, `4096`. GB is 1000³ bytes and GiB 1024³."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-zA-Z]*)\s*", value)
        unit = _UNITS.get(match.group(2).lower()) if match else None
        if match is None or unit is None:
            self.fail(f"{value!r} is no size; write it like 256MiB, 5GB or 4096", param, ctx)
        number = round(float(match.group(1)) * unit)
        if number < 1:
            self.fail(f"{value!r} is less than one byte", param, ctx)
        return number


class RateType(SizeType):
    """Bytes a second: `55GB/s`, or the same without `/s`."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return super().convert(value.removesuffix("/s") if isinstance(value, str) else value, param, ctx)


class DurationType(click.ParamType):
    """Seconds: `90`, `90s`, `250ms`, `20min`, `3.1h`, `2d`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float | int):
            return float(value)
        units = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", value)
        unit = units.get(match.group(2)) if match else None
        if match is None or unit is None:
            self.fail(f"{value!r} is no time; write it like 90s, 20min, 3.1h or 2d", param, ctx)
        return float(match.group(1)) * unit


class ShareType(click.ParamType):
    """A share in (0, 1]: `5%` or `0.05`."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", value)
        share = float(match.group(1)) / (100 if match.group(2) else 1) if match else 0.0
        if not 0 < share <= 1:
            self.fail(
                f"{value!r} is no share; write it like 5% or 0.05, above 0 and at most 100%", param, ctx
            )
        return share


class LayoutType(click.ParamType):
    """A layout, as `ckptkit inspect` prints it: `tp=2,pp=4:6/7/7/7,ep=4,dp=4,zero=1`."""

    name = "layout"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> "Layout":
        from ckptkit.core.layouts import Layout

        if isinstance(value, Layout):
            return value
        try:
            return Layout.parse(value)
        except CkptError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        """The degrees that are not given yet."""
        from click.shell_completion import CompletionItem

        done, comma, open_ = incomplete.rpartition(",")
        given = {item.partition("=")[0] for item in done.split(",")}
        degrees = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp", "zero", "order")
        return [
            CompletionItem(f"{done}{comma}{name}=")
            for name in degrees
            if name.startswith(open_) and name not in given
        ]


class SettingType(click.ParamType):
    """`NAME=VALUE`, the value being JSON where it is JSON, and text where it is not."""

    name = "name=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        import json

        if isinstance(value, tuple):
            return value
        name, sign, text = value.partition("=")
        if not sign or not name.strip():
            self.fail(f"{value!r} is not NAME=VALUE, for example num_hidden_layers=8", param, ctx)
        try:
            return name.strip(), json.loads(text)
        except ValueError:
            return name.strip(), text


class DTypeType(click.ParamType):
    """A floating-point type by torch's name or a short form: `bfloat16`, `bf16`, `float32`."""

    name = "dtype"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from ckptkit.core.dtypes import BY_NAME, dtype_named

        known = [name for name, dtype in BY_NAME.items() if dtype.is_float and dtype.itemsize > 1]
        try:
            name = dtype_named(value).name
        except CkptError:
            name = ""
        if name not in known:
            self.fail(
                f"{value!r} is no type that weights can be cast to; those are {', '.join(known)}", param, ctx
            )
        return name

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(n) for n in ("bfloat16", "float16", "float32") if n.startswith(incomplete)]


class PlaceType(click.ParamType):
    """A path, a URL, a run or a step of a run; shells complete it as a folder."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not str(value).strip():
            self.fail("an empty path names no checkpoint", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="dir")]


class DestinationType(PlaceType):
    """A path or URL to write to. `RUN@1200` names a step that is there, and would become a folder of that name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        place = super().convert(value, param, ctx)
        if re.search(r"@(latest|\d+(\.e\d+)?)/*$", place):
            self.fail(
                f"{place!r} names a step of a run; give a new folder, for example RUN/step-00001200.e3",
                param,
                ctx,
            )
        return place


class NameType(click.ParamType):
    """A name out of a list that is only known when it is needed: a format, a model, a family of names."""

    def __init__(self, name: str, known: Callable[[], Iterable[str]]) -> None:
        self.name = name
        self._known = known

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        with suppress(Exception):  # a shell that completes is no place for an error message
            return [CompletionItem(name) for name in self._known() if name.startswith(incomplete)]
        return []


def _formats() -> Iterable[str]:
    from ckptkit.formats.registry import FORMATS

    return list(FORMATS)


def _models() -> Iterable[str]:
    from ckptkit import models

    return list(models.schemas())


def _presets() -> Iterable[str]:
    from ckptkit.ops.synthesis import PRESETS

    return [*_models(), *PRESETS]


def _names() -> Iterable[str]:
    from ckptkit import models

    families = [family.name for schema in models.schemas().values() for family in schema.families]
    return sorted({"canonical", *families})


SIZE, SHARE, LAYOUT, SETTING = SizeType(), ShareType(), LayoutType(), SettingType()
RATE, DURATION = RateType(), DurationType()
DTYPE, PLACE, DESTINATION = DTypeType(), PlaceType(), DestinationType()
FORMAT, MODEL = NameType("format", _formats), NameType("model", _models)
FILE = click.Path()
NAMES, PRESET = NameType("names", _names), NameType("preset", _presets)
