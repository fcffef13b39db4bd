"""A cluster of snapshot processes simulated in one process, from one seed.

The decisions are those of the library: the state machine of every node, joining, restoring and
decoding. Clock, network, memory, disks and trainers are simulated, and faults are drawn.

- ``world``       the virtual clock, the queue of events, and the log of what happened
- ``network``     links between nodes: delays, losses, cuts
- ``node``        a node: the library's state machine with simulated memory
- ``disk``        the process of a node that writes checkpoints
- ``trainers``    the ranks: the library's exchanges and copies, driven on the virtual clock
- ``resizing``    a run that goes on with other nodes
- ``faults``      what befalls the cluster
- ``invariants``  what must hold after every event
- ``minimise``    the fewest faults that still break an invariant
- ``planted``     deliberate bugs that the simulator must find
- ``runs``        one seed, or many on several cores
"""
