"""Where a phrase stands in a stored sequence: token ids or code symbols, exact, fuzzy, or by points of a map code."""
