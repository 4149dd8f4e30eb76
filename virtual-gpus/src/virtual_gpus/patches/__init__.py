"""Names that are replaced while virtual GPUs are on (`table`), and modules that captured replacements (`captured`)."""
