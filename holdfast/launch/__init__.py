"""The start of ranks: a standby process that forks them, and torchrun's rendezvous, made quick."""
