"""The layout of a training state in memory; nothing here does I/O.

- ``training_state`` the live objects of a run as a nested state, and back
- ``identity``       whose state it is: the run's id, command line and hyper-parameters
- ``flat_buffer``    a nested state as one flat buffer of tensors, and back
- ``manifest``       the description of that buffer, with digests
- ``dtensors``       shards of tensors that several ranks divide (FSDP2, tensor parallel)
- ``groups``         the ranks on different nodes that may protect each other
- ``node_groups``    the parity groups that nodes form, and the tree of the groups
- ``shares``         the share of a state that a rank keeps, its digests and manifest
"""
