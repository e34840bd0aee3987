"""Numbers to integers. The last folder that sees torch."""
