"""The newest step that all ranks can load.

- ``newest_state``     the order: this node's memory, the memories of all nodes, disk
- ``disk_restore``     one rank's part in loading a checkpoint
- ``cluster_restore``  one rank's part in putting a state together from several nodes
- ``choose_step``      which steps can be put together, told from what the nodes hold
- ``assembly``         a state from what is left; ``fetch`` reads and checks fragments,
  ``stripe_decode`` decodes lost ones, ``expected_digests`` are what all must match
- ``reader``           a clean step, pinned, for any process that wants to read it
- ``full_state``       the full states of a node's ranks, for the persister and the commands
"""
