"""Verified convolutions: signed sums over images, channels and weights (README.md)."""
