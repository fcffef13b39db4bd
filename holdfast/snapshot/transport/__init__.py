"""Messages between processes and nodes.

- ``frames``    what is sent: a header, bytes, file descriptors; and a client's blocking connection
- ``local``     the run directory's Unix socket
- ``channel``   a connection that never blocks the SMP; ``door`` accepts such connections
- ``linking``   decides about the links between SMPs, without I/O; ``handshake`` has their proofs
- ``links``     carries that out over a transport; ``contract`` says what a transport is
- ``tcp``       the transport in use; ``tls`` encrypts it, ``rate`` limits parities
- ``remote``    a rank's access to the SMP of any node; ``requests`` are what it asks
"""
