"""Writes those files of the chart that follow from others: its schema, its README and the operator's permissions."""
