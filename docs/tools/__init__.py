"""Programs for those who look after the course: `python -m docs.tools.NAME`."""
