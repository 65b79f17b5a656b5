"""Checkpoints: what they hold, how they are converted and staged. Importing the package imports no torch."""

DTYPES = ("bfloat16", "float16", "float32")
"""What a checkpoint is written in and computed with; torch's own names."""
