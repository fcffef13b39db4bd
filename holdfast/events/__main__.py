"""Print the table of ``docs/events.md``: ``python -m holdfast.events``."""

from holdfast.events.kinds import kinds_table

print(kinds_table(), end="")
