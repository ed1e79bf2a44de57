"""Ranks that are killed, paused and delayed while they train and save: who is named, how soon, and what is left."""
