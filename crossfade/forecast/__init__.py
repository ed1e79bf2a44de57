"""Forecasts: from a model, a mesh and a machine to step time and memory, without a device and without weights."""
