"""Streams and events, and the streams of backward passes."""
