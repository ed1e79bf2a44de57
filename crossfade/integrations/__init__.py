"""Crossfade in the loops of training frameworks, each behind an extra (`pip install crossfade[accelerate]`), and
as a backend of `torch.compile`."""
