"""Symbols to bytes and back, without loss. From here on it is numpy and bytes; no torch."""
