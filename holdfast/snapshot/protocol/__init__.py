"""The SMP's decisions: events in, instructions out; no I/O, no clock, no torch, no NumPy.

- ``messages``            events and instructions; ``roster`` names nodes, epochs and steps
- ``state_machine``       handles the events; its parts decide over the same ``slots``
- ``steps``               a step from ``begin`` to committed or aborted
- ``cluster_commit``      a step until every node holds it
- ``cluster``             the exchange within a group; ``cluster_steps`` records its progress
- ``commit_tree``         the agreement of several groups on the steps that are committed
- ``parity_stream``       blocks on their way to the nodes that keep their parities
- ``restore_agreement``   the local ranks' agreement on the step to restore
- ``leases``              readers of clean steps
- ``exchange``            what a rank asks of others and of its SMP, one request after the other
- ``checkpoint_schedule`` the agreement of all nodes on the checkpoints to write and keep
"""
