"""Stripes over the nodes of a sharding group, and the erasure code that replaces lost ones.

- ``stripes``      the layout: which node keeps which blocks and parities
- ``erasure_code`` the code of a stripe, computed in place; ``isal`` binds the ISA-L library
"""
