"""Which storage lives on which virtual GPU."""
