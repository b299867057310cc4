"""Checkpoints of a job: published by its owner alone, verified before use, selected by one pure function."""
