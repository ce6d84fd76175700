"""A plan beside the limits of the hardware.

* `roofline`: time of each operation beside the least that its bytes and arithmetic could take
"""
