"""The modelled clock: what operators, copies and collectives cost, and who waits for whom."""
