"""The trainer: arguments, data, model, loop, checkpoints and logs."""
