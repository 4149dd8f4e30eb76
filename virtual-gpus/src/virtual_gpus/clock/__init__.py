"""The modelled clock: what operators, copies and collectives cost, and what waits for what."""
