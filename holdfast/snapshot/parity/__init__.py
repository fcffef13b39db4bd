"""Stripes over the nodes of a sharding group, and the code that makes up for lost ones.

- ``stripes``      the layout: which node keeps which blocks and parities
- ``erasure_code`` the coding of stripes, in place; ``isal`` binds the library that does it
"""
