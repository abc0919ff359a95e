"""What `megabatch bench` measures on the machine at hand: all-reduce, the training step, data, optimizers."""
