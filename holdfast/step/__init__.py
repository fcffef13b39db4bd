"""One training step of a ``Guard``: what is refused, how a pass is judged, how it is applied."""
