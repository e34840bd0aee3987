"""Judging a restored cache by what the model says next."""
