"""Scripts that run in a peer's own environment, and the packages each environment holds (`*.txt`, all pinned)."""
