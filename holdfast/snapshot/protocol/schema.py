"""Records with a schema, by which frames are checked."""

from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

import msgspec
from msgspec import field


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class _Verbs(msgspec.StructMeta):
    """Notes the ``verb`` of each message at its sender, under which a frame names it."""

    def __new__(
        cls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        verb: str = "",
        sender: bool = False,
    ) -> "_Verbs":
        made: Any = super().__new__(
            cls, name, bases, namespace, frozen=True, forbid_unknown_fields=True
        )
        if sender:
            made.by_verb = {}
        if verb:
            made.by_verb[verb] = made
        return made  # type: ignore[no-any-return]


class Message(msgspec.Struct, metaclass=_Verbs):
    """An immutable record; one with a ``verb`` can arrive in a frame under this name."""

    by_verb: ClassVar[dict[str, type[Any]]] = {}

    if TYPE_CHECKING:

        def __init_subclass__(cls, verb: str = "", sender: bool = False) -> None: ...
