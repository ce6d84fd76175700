"""`mbc bench`: a training step by mbc and by others, in one run, on the same data and with the same mathematics."""
