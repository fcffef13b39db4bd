"""Messages between processes and nodes.

- ``frames``    what is sent: a header, bytes, file descriptors; and a client's blocking connection
- ``local``     the run directory's Unix socket
- ``channel``   a connection that never blocks the SMP; ``sockets`` are all of one kind
- ``tcp``       those between nodes; ``tls`` encrypts them
- ``links``     decides about the links between SMPs; ``handshake`` has their proofs
- ``remote``    a rank's access to the SMP of any node; ``requests`` are what it asks
"""
