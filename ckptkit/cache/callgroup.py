"""What groups of calls share: the daemon, arguments checked by name and type, answers of the protocol as errors."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.cache.events import Answer, Begun, Called, Lease
from ckptkit.cache.messages import Version
from ckptkit.cache.uds import CallError, Reply, Session
from ckptkit.cache.wire import Message

if TYPE_CHECKING:
    from ckptkit.cache.daemon import Daemon

Handler = Callable[[Session, Message], Awaitable[Reply]]


class CallGroup:
    """Some calls of one daemon: each name of `names` is the method `_name`."""

    names: tuple[str, ...] = ()

    def __init__(self, daemon: "Daemon") -> None:
        self.d = daemon

    @property
    def table(self) -> dict[str, Handler]:
        return {name: getattr(self, f"_{name}") for name in self.names}

    def called(self, session: Session, call: Any) -> Answer | Begun | Lease:
        return self.d.call(session.number, Called(session.number, session.peer.owner, call))

    def version_of(self, message: Message) -> Version:
        """The version that is meant by a step, and an epoch where the step is in several."""
        step, epoch = whole(message.fields, "step"), message.fields.get("epoch")
        node = self.d.node
        known = {r.version for r in node.table if r.version is not None}
        if node.record is not None:
            known |= {
                v
                for v in (node.record.newest, node.record.keep, node.record.durable, node.record.restored)
                if v is not None
            }
        if node.epoch is not None:
            known.add(node.epoch.version(step))
        found = sorted(v for v in known if v.step == step and epoch in (None, v.epoch))
        if not found and type(epoch) is int:
            return Version(epoch, step, "0" * 32)
        if not found:
            raise CallError(404, f"step {step} is not known here; name its epoch, too")
        return found[-1]


def refusal(answer: Answer | Begun | Lease) -> CallError:
    if isinstance(answer, Answer):
        return CallError(answer.code, answer.detail or "refused")
    return CallError(500, f"an unexpected answer ({type(answer).__name__})")


def whole(fields: dict[str, Any], name: str, low: int = 0) -> int:
    value = fields.get(name)
    if type(value) is not int or not low <= value < 2**53:
        raise CallError(400, f"{name} is {str(value)[:40]}, but should be a number from {low} on")
    return value


def numbers(value: Any) -> dict[str, float]:
    """The numbers of an object, at most a few; anything else is left out."""
    if not isinstance(value, dict):
        return {}
    items: Sequence[tuple[Any, Any]] = list(value.items())[:32]
    return {str(k): float(v) for k, v in items if type(v) in (int, float) and 0 <= v < 1e18}
