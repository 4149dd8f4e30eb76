"""`shapes_only`: sizes without values."""
