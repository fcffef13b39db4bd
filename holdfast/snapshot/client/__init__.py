"""The trainer's side of snapshots.

- ``snapshots``      ``holdfast.Snapshots``; ``settings`` are its keywords
- ``training_state`` the state of a run, taken apart and put back bit for bit
- ``copier``         the thread that copies it; ``inflight`` is one copy
- ``shards``         copies a rank's share of a state, and encodes its parities
- ``session``        one rank's conversation with the SMP
- ``membership``     the ranks of all nodes, and their agreements
- ``pacing``         ``interval="auto"``
"""
