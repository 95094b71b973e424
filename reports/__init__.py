"""CSV and HTML reports of a search."""
