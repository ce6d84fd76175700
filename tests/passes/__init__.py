"""A small classifier around the layers that the test of a pass writes."""
