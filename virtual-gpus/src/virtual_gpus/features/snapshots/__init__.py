"""The history of a GPU's memory, and its snapshots."""
