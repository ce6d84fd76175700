"""The end of a step.

* `optimizer`: whether the step counts, and the new parameters
* `multi_tensor`: one operation on each of many tensors, in one launch
"""
