"""Comparison of a plan with the limits of the hardware.

* `roofline`: time of each operation beside the least time that its bytes and arithmetic allow
"""
