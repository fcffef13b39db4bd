"""Snapshots of training state: in memory that outlives the trainer (rung 3), on disk (rung 5).

A guided tour, pure parts first:

- ``messages``  what a rank may say to the SMP and what the SMP may be told to do, as dataclasses
- ``protocol``  the SMP's decisions: slots, node-atomic commit, agreement on a restore; no I/O
- ``slots``     the records that ``protocol`` decides over
- ``leases``    who reads which clean step, and what is due to be persisted
- ``rounds``    how ranks agree on the step to restore; ``recalls`` if it is one on disk
- ``layout``    a nested state as one flat buffer of tensors, and back
- ``manifest``  what lies where in that buffer, with digests
- ``groups``    which ranks on different nodes share a state, and may protect each other
- ``stripes``   which node of such a group keeps which blocks and parities, and what a loss needs
- ``parity``    the coding of stripes, in place; ``isal`` binds the library that does it
- ``cluster``   what the SMPs of several nodes owe each other until a step is sealed
- ``sealing``   the slots' side of that
- ``recovery``  which step survives, told from what the nodes hold
- ``shares``    which share of a state a rank keeps, its digests and manifest
- ``gather``    the bytes of a state from its live tensors; ``shards`` copies and encodes them
- ``witnesses`` what the manifests say of each fragment
- ``fetch``     fragments read from other nodes, and checked; ``columns`` decodes what is missing
- ``assembly``  a state put together from what is left
- ``state``     which state a training run consists of, and how it is put back bit for bit
- ``transport`` frames with file descriptors over the run directory's Unix socket
- ``memory``    memfd buffers, checked against the memory that is really available
- ``peer``      one connection as the SMP sees it
- ``links``     authenticated TCP among the SMPs; ``remote`` is a rank's end of it
- ``smp``       the snapshot management process: a thin loop around ``protocol``
- ``locks``     exclusive locks between processes
- ``launch``    finding, starting, asking and stopping the SMP of a run directory
- ``session``   one rank's conversation with the SMP
- ``supervisor`` the persister as the SMP sees it; ``orphan`` ends it with the SMP
- ``reader``    a clean step, pinned, for any process that wants to read it
- ``persist_format``, ``persist``  one checkpoint's files, and the folder of checkpoints
- ``persister`` the process that writes them; ``persist_request`` asks it to
- ``export``    a step as files for stock tools
- ``inflight``  the copy in flight, and whether the model held still meanwhile
- ``restore``   one rank's part in the agreement on the step to restore; ``recall`` from disk
- ``membership`` the ranks of all nodes, and what they agree on; ``rebuild`` restores with them
- ``whole``     a divided state put together for the persister and the commands
- ``client``    ``holdfast.Snapshots``

The SMP imports neither torch nor, before it must, NumPy, so that it starts in a fraction of a
second.
"""
