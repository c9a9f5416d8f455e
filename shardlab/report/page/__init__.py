"""The page of a run for a browser: one file of HTML, with its data, its style and its script inside."""
