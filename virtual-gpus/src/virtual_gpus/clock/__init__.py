"""The modelled clock: what operators and copies cost, and what waits for what."""
