"""The `.kvc` file: sealed blocks of tokens, a tail that grows, commits, an index. Bytes: docs/format.md."""
