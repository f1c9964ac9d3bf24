"""Geometry and planning: tensors, boxes, views, layouts, catalogs, plans. Pure: numpy only, no I/O."""
