"""Ways in and out: the Python library, transformers, the command line. Nothing inside kvcellar imports these."""
