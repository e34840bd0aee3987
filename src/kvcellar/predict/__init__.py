"""What decoder and encoder both foresee of a layer group."""
