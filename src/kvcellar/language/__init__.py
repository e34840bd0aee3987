"""Token ids as a language model sees them: logs that code them, and how probable they are."""
