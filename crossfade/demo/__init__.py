"""The demonstration behind `crossfade demo`: a small GPT trained by Crossfade and by torch, side by side."""
