"""Whether dividing operations into micro-batches changes what a network computes: what `mbc check` asks."""
