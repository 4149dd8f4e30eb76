"""Processes that a program starts, and the tensors that it shares with them."""
