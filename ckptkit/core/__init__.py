"""Geometry and planning: tensors, boxes, views, pieces, catalogs, layouts, plans. NumPy only, no I/O."""
