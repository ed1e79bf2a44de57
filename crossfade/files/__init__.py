"""Reading files that may come from a stranger: nothing in them is run, and what is wrong is named with its place."""
