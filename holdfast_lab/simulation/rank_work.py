"""What the threads of a rank do: restore, train, snapshot, and end."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.errors import SmpUnavailable
from holdfast.snapshot.client.copier import replacing
from holdfast.snapshot.node.addresses import Place
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.exchange import Call, Gather
from holdfast.snapshot.protocol.messages import ANY_STEP
from holdfast.snapshot.restore import cluster_restore, newest_state
from holdfast_lab.simulation import resizing, states
from holdfast_lab.simulation.reading import SimulatedDisk, SimulatedMembership, SimulatedRemote
from holdfast_lab.simulation.session import TROUBLE
from holdfast_lab.simulation.world import STEP_S

if TYPE_CHECKING:
    from holdfast_lab.simulation.trainers import Process, Rank, Work

# The share of copies that are dropped because a tensor changed meanwhile, and of steps in large
# clusters: no step is committed of which a rank drops its copy.
TORN, TORN_STEPS = 0.01, 0.06
PAUSE_S = 1.0  # without snapshots after an error, doubled by each further one
_LONGEST_PAUSE_S = 8.0


class RankWork:
    """One life of a rank.

    Attributes:
        step, token: the step that was trained last, and the number that its state follows from.
        closing: true once the rank waits for the others to end.
    """

    def __init__(self, rank: Rank) -> None:
        from holdfast_lab.simulation import trainers

        self._requests = trainers
        self._rank, self._world = rank, rank.world
        self.step = self.token = 0
        self.closing = False
        self._membership = SimulatedMembership(rank)
        self._copying: Process | None = None
        self._uses_session = True
        self._paused_until_s, self._pause_s, self._broken = 0.0, PAUSE_S, False
        self._granted: memoryview | None = None

    @property
    def idle(self) -> bool:
        """True if no thread of the rank would notice soon that the SMP is gone."""
        return not self._uses_session and self._copying is None

    def main(self) -> Work:
        """Restore, train, and end after the last step."""
        yield Call("connect")
        yield from self._restore()
        while self.step != self._rank.trainers.last_step:
            yield self._requests.Sleep(self._world.soon(0.5, 1.5) * STEP_S / 2)
            yield self._requests.Collective()
            yield from self._hand_over()
            self.step += 1
            self.token = states.next_token(self.token, self.step, self._rank.life)
            yield from self._start_copy()
            yield self._requests.Sleep(self._world.soon(0.5, 1.5) * STEP_S / 2)
        yield from self._close()

    def _restore(self) -> Work:
        notes: list[str] = []
        rank, world = self._rank, self._world
        remote = partial(SimulatedRemote, rank)
        about = self._membership, states.tree_of, notes.append
        load: Any = partial(cluster_restore.load, *about, remote=remote)
        if world.former is not None:
            load = partial(resizing.loaded, world.former, self._membership, notes.append, remote)
        how = "host", load, ANY_STEP, world.keep, notes.append, lambda host: Place(host, "one")
        memory = cluster_restore.agreeing(self._membership, *how)
        disk = SimulatedDisk(rank) if world.persist_every else None
        found = yield from newest_state.finding(memory, disk, True, notes)
        epoch = self._membership.roster.epoch if self._membership.roster else 0
        world.invariants.restored(rank, epoch, found)
        self._source = states.Source.of(rank.rank, 0, self._membership)
        if world.resizes and not world.replicated:
            place = resizing.sharding(rank.rank, world.ranks)
            self._source = self._source._replace(sharding=place)
        self._asked = self._source.asked()
        self._uses_session = False
        if found is None:
            return
        self.step, self.token = found.step, found.tree["token"]
        if rank.local == 0:
            world.nodes[rank.node].disk.go_back(self.step)
        yield from self._start_copy()
        yield from self._wait_committed()

    def _start_copy(self) -> Work:
        if self._broken and self._world.now < self._paused_until_s:
            if not self._rank.session.lost:
                yield Call("skip_step", (self.step,))
            return
        epoch = self._membership.roster.epoch if self._membership.roster else 0
        self._world.invariants.begins(self._rank, epoch, self.step, self.token)
        self._copying = self._rank.spawn(self._copy(self._broken))

    def _copy(self, broken: bool) -> Work:
        """Copy the state in the background; return what the SMP is to be told."""
        if broken:
            yield from replacing(self._membership)
            self._broken = False
        return (yield from self._retried(self._write))

    def _retried(self, work: Any) -> Work:
        """Do as ``Copier.retried``: replace a lost SMP once."""
        try:
            return (yield from work())
        except ConnectionError:
            yield from self._replace()
        try:
            return (yield from work())
        except ConnectionError as again:
            raise SmpUnavailable(f"the SMP was lost twice: {again}") from again

    def _replace(self) -> Work:
        self._world.stats["replaced"] += 1
        yield self._requests.Sleep(self._world.soon(0.02, 0.2))
        yield from replacing(self._membership)

    def replacing(self) -> Work:
        """Replace a lost SMP in the background, before any thread needs it."""
        try:
            yield from self._replace()
        except TROUBLE:
            self._fail()

    def _write(self) -> Work:
        rank, world = self._rank, self._world
        source, sizes = self._source._replace(token=self.token), None
        if not world.replicated:
            sizes = yield Call("sizes", (self.step, *self._asked))
            if sizes is None:
                return None
        copied, content = source.written(sizes)
        memory = yield Call("begin", (self.step, len(copied)))
        if memory is None:
            return None
        self._granted = memoryview(memory)
        yield self._requests.Sleep(world.soon(1e-3, 2e-2) * world.nodes[rank.node].pace ** 0.5)
        memory[: len(copied)] = copied
        if world.draw.random() < min(TORN, TORN_STEPS / len(world.trainers.ranks)):
            return m.SkipStep(rank.local, self.step)
        return states.written(rank.local, self.step, content)

    def scribble(self) -> None:
        """Let a process that died write to its slot for another moment."""
        if self._granted is not None and self._copying is not None:
            self._world.at(self._world.soon(0, 4.0), _scribble, self._granted)

    def _hand_over(self) -> Work:
        """Tell the SMP of the copy in flight, as ``Copier.complete``."""
        if self._copying is None:
            return
        self._uses_session = True
        try:
            event = yield self._requests.Result(self._copying)
            if isinstance(event, m.SkipStep):
                yield from self._retried(lambda: self._call("skip_step", event.step))
            elif event is not None:
                yield from self._say_written(event)
        except TROUBLE:
            self._fail()
        finally:
            self._copying, self._uses_session = None, False
            self._granted = None

    def _say_written(self, event: m.Written) -> Work:
        try:
            yield Call("written", (event,))
        except ConnectionError:
            yield from self._replace()
            again = yield from self._write()
            if isinstance(again, m.Written):
                yield Call("written", (again,))

    def _call(self, method: str, *arguments: object) -> Work:
        return (yield Call(method, arguments))

    def _fail(self) -> None:
        self._broken = True
        self._paused_until_s = self._world.now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._world.stats["outages"] += 1

    def _wait_committed(self) -> Work:
        yield from self._hand_over()
        if self._broken:
            return
        self._uses_session = True
        try:
            yield Call("settle")
        except ConnectionError:
            try:
                yield from self._replace()
            except TROUBLE:
                self._fail()
        self._uses_session = False

    def _close(self) -> Work:
        yield from self._wait_committed()
        self.closing = True
        self._world.faults.closes(self._rank)
        yield Gather(None)
        self._uses_session = True
        try:
            yield Call("finished")
        except ConnectionError:
            self._world.say("rank {}: the SMP was lost at the end", self._rank.rank)


def _scribble(memory: memoryview) -> None:
    memory[:] = b"\xab" * len(memory)
