"""Timelines: what the modelled host and GPUs did during a block of code."""
