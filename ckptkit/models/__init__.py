"""Schemas of model families: the axes and the names of their tensors."""
