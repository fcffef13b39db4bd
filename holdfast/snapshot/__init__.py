"""Snapshots of training state: in memory that outlives the trainer (rung 3), on disk (rung 5).

Each package says what its modules are for; in the order in which a snapshot passes them:

- ``client``    in the trainer: ``holdfast.Snapshots``, the thread that copies, the SMP's caller
- ``layout``    a state as one buffer and its description; which rank keeps which share of it
- ``parity``    stripes over the nodes of a group, and the code that makes up for lost ones
- ``protocol``  the SMP's decisions as a state machine without I/O
- ``node``      the snapshot management process (SMP) around it, its memory, its start
- ``transport`` frames over the node's Unix socket, and authenticated links between nodes
- ``disk``      the process that writes checkpoints, their files, and exports for stock tools
- ``restore``   the newest step that all ranks can load: from memory, rebuilt, or from disk

``protocol`` imports none of the others, and the SMP neither torch nor, before it must, NumPy, so
that it starts in a fraction of a second.
"""
