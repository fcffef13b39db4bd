"""Verified matrix products."""
