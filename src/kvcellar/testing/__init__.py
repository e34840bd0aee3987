"""Conformance suites: inherit one in a test module and every stage is held to the same contract. Needs pytest."""
