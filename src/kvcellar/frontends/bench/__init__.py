"""Judging recipes on a real model: windows of text, the uncompressed side computed once, decoding in a new process."""
