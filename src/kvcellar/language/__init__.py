"""The text behind a cache: what a language model makes of token sequences."""
