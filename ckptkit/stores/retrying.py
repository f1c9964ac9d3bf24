"""Requests to remote stores: which faults pass, how often they are tried again, and how a fault is told.

A fault that may pass (no answer, a broken connection, 429, 5xx, a short body) is tried again after a random time below a
ceiling that doubles ("full jitter"), a bounded number of times and for a bounded time in all. A fault that will not pass (absent, forbidden, no
credentials, a missing library) is told at once. Libraries retry some of these on their own, below this.
"""

import errno
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ckptkit.errors import CkptError, ShardMissingError, StoreError, UsageError

T = TypeVar("T")

VARIABLE = "CKPTKIT_RETRY"
"""Environment variable that changes the defaults of `Retry`: `attempts=8,wait_s=0.25,longest_s=15,total_s=180`."""

_SECRETS = re.compile(
    r"(?i)((?:x-(?:amz|goog)-(?:signature|credential|security-token)|sig|signature|authorization|token|secret\w*|password"
    r"|awsaccesskeyid|accountkey)[\"']?\s*[=:]\s*[\"']?)(?:bearer\s+|basic\s+)?[^\s&\"',;)]+"
)
_NO_CREDENTIALS = re.compile(r"credential|ProfileNotFound|NoAuth", re.IGNORECASE)
_BUGS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    TypeError,
    ValueError,
)
_FINAL_CODES = {
    errno.EINVAL,
    errno.EPERM,
    errno.ENOSYS,
    errno.EMSGSIZE,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.EDQUOT,
}


class ShortBodyError(OSError):
    """A response that does not hold what was asked for."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How stubborn requests are.

    Attributes:
        attempts: Tries of one request, the first included.
        wait_s: Ceiling of the random wait after the first try; it doubles with each further one,
        longest_s: up to this.
        total_s: No further try begins once a request has taken this long.
    """

    attempts: int = 8
    wait_s: float = 0.25
    longest_s: float = 15.0
    total_s: float = 180.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or min(self.wait_s, self.longest_s, self.total_s) < 0:
            raise UsageError(f"{self}: at least one attempt, and no negative times")

    @classmethod
    def from_environment(cls) -> "Retry":
        """The defaults, changed by `CKPTKIT_RETRY`. Raises UsageError where that makes no sense."""
        given: dict[str, Any] = {}
        kinds: dict[str, Callable[[str], Any]] = {
            field.name: int if field.name == "attempts" else float for field in fields(cls)
        }
        for item in filter(None, os.environ.get(VARIABLE, "").split(",")):
            name, _, value = item.strip().partition("=")
            try:
                given[name] = kinds[name](value)
            except (KeyError, ValueError) as error:
                raise UsageError(
                    f"{VARIABLE}: {item!r} is not understood; write for example attempts=8,wait_s=0.25,longest_s=15,total_s=180"
                ) from error
        return cls(**given)

    def call(self, action: str, url: str, request: Callable[[], T], stop: threading.Event | None = None) -> T:
        """What `request` gives, tried again while its faults may pass.

        Args:
            action: What is done, for messages ("read", "list", "write").
            url: To what.
            stop: Ends the waiting when it is set.

        Raises:
            ShardMissingError: what is read is absent. StoreError: any other fault. Errors of ckptkit pass as they are.
        """
        began = time.monotonic()
        for attempt in range(1, self.attempts + 1):
            try:
                return request()
            except CkptError:
                raise
            except Exception as error:
                wait = random.uniform(0, min(self.wait_s * 2 ** (attempt - 1), self.longest_s))
                spent = time.monotonic() - began
                if is_final(error) or attempt == self.attempts or spent + wait > self.total_s:
                    raise fault(action, url, error, attempt, spent) from error
                if stop is None:
                    time.sleep(wait)
                elif stop.wait(wait):
                    raise fault(action, url, error, attempt, spent) from error
        raise AssertionError("every attempt returns or raises")


def is_final(error: BaseException) -> bool:
    """Whether trying again is pointless."""
    if isinstance(error, ShortBodyError):
        return False
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        return is_final(error.__cause__)  # fsspec's HTTP calls every fault so
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, *_BUGS)):
        return True
    if _NO_CREDENTIALS.search(type(error).__name__):
        return True
    status = status_of(error)
    if status is not None and 400 <= status < 500:
        return status not in (408, 425, 429)
    return isinstance(error, OSError) and error.errno in _FINAL_CODES


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status that an error carries (of aiohttp, gcsfs, azure or botocore, or of its cause), or None."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            found = next(
                (getattr(error, n, None) for n in ("status", "status_code", "code") if hasattr(error, n)),
                None,
            )
        if isinstance(found, int) and 100 <= found < 600:
            return found
        error = error.__cause__
    return None


def fault(action: str, url: str, error: BaseException, attempts: int = 1, spent_s: float = 0.0) -> CkptError:
    """The error to raise: what failed, where, and what to do. Holds no secrets."""
    if isinstance(error, FileNotFoundError) and is_final(error) and action != "write":
        return ShardMissingError(f"{url} is missing", file=url)
    reason = plain(error)
    status = status_of(error)
    if isinstance(error, PermissionError) or status in (401, 403):
        advice = "You may not do that there: check which credentials are used, and their rights"
    elif _NO_CREDENTIALS.search(type(error).__name__):
        advice = (
            "Give credentials in the way that the store's own library takes them (docs/stores.md lists them)"
        )
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "Free some space there or choose another destination, then run the same command again"
    elif is_final(error):
        advice = "Mend the cause, then run the same command again"
    else:
        tries = f" ({attempts} tries in {spent_s:.0f} s)" if attempts > 1 else ""
        return StoreError(
            f"cannot {action} {url}: {reason}{tries}. The store or the way to it is at fault; run the same command again when "
            "it answers",
            file=url,
            attempts=attempts,
        )
    return StoreError(f"cannot {action} {url}: {reason}. {advice}", file=url, attempts=attempts)


def plain(error: BaseException) -> str:
    """The text of a library's error on one line, without signatures, tokens and passwords."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = _SECRETS.sub(r"\1***", text)
    text = re.sub(r"://[^/@\s]+@", "://***@", text)
    return text if len(text) <= 300 else text[:299] + "…"
