"""The zoo: small training loops with the structure of well-known public ones, under faults."""
