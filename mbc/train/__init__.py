"""Training a module on data: where batches come from, the learning rate, the loop, checkpoints that resume."""
