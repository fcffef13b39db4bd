"""The newest step that all ranks can load.

- ``newest_state``     tries this node's memory, then the memories of all nodes, then disk
- ``disk_restore``     one rank's part in loading a checkpoint
- ``cluster_restore``  one rank's part in rebuilding a state from several nodes
- ``choose_step``      the steps that can be rebuilt from what the nodes hold
- ``assembly``         rebuilds a state: ``stripe_decode`` fetches its fragments, decodes lost ones,
  and compares all with their digests
- ``elastic``          deals a state anew to other ranks, or to another mesh
- ``reader``           a pinned clean step, for any process that reads it
- ``full_state``       the full states of a node's ranks, also if these divided them
"""
