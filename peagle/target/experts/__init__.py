"""The experts of a target: where its modules keep them, and experts as stored in a checkpoint."""
