"""The exact, verified int8 product."""
