"""Optimizer updates, of one tensor and of many in a launch, and the decision whether a step counts."""
