"""The trainer: arguments, data, model, loop, checkpoints and logs."""

import warnings

# megatron-core says this four times on every rank when it is imported, beside whatever the run has to say.
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
