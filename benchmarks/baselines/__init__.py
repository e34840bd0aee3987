"""Peers of our own making, written from their descriptions."""
