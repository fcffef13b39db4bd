"""Training loops of several ranks, with faults on one of them.

Each loop trains a small model on gloo ranks of this machine: bare, with a Guard, and with a Guard
while one rank is struck by a fault or killed. ``python -m holdfast_lab.zoo.ranks`` runs them.
"""
