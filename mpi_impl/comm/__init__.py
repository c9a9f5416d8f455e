"""Who speaks with whom, how, and a record of what was said."""
