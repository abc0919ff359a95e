"""Settings that make `demo` a run of seconds, for benchmarks of many runs and for the system tests."""

# 5 ghost batches a step: not divisible by 2, 3 or 4 workers. 330 images an epoch: no multiple of the batch.
SMALL_RUN = (
    "data.source=generated",
    "data.image_size=12",
    "data.generated.num_train=330",
    "data.generated.num_val=103",
    "model.width=8",
    "train.global_batch_size=40",
    "train.ghost_batch_size=8",
    "train.epochs=4",
    "optimizer.lr=0.2",
)
