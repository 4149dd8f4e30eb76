"""What several processes know of one another."""
