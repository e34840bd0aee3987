"""Where archives live. The archive knows only the base class in `base`."""
