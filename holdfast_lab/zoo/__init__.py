"""Training loops as people write them, with faults: each ends with the bits of the calm run."""
