"""Linear maps of a layer group's residual into the coefficients that are quantized."""
