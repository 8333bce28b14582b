"""The flags of a run's output: checkpoints, logs and profiles."""

from megatron.context_parallel.cli.flag import FlagSection, flag


class Checkpointing(FlagSection, title="checkpointing"):
    """saving and loading checkpoints"""

    save: str | None = flag("directory to write checkpoints to", unit="DIR")
    save_interval: int | None = flag("updates between checkpoints; the last is saved too", example=100, needs="save")
    async_save: bool = flag("continue training while checkpoints are written", False, needs="save")
    keep_last: int | None = flag(
        "keep only this many checkpoints, once a newer one is complete", derived="all", example=3, needs="save"
    )
    save_retain_interval: int | None = flag(
        "keep multiples of this, and the last or --keep-last checkpoints; delete others", example=1000, needs="save"
    )
    save_on_error: str = flag(
        "after a failed save, stop, or continue until the next save", "stop", choices=("stop", "continue"), needs="save"
    )
    no_save_optim: bool = flag("leave the optimizer out of checkpoints", False)
    no_save_rng: bool = flag("leave the random generators out of checkpoints", False)
    load: str | None = flag("directory of checkpoints to resume from; if it has none, start from scratch", unit="DIR")
    no_load_optim: bool = flag("do not restore the optimizer", False)
    no_load_rng: bool = flag("do not restore the random generators", False)
    finetune: bool = flag("restore only the weights, and start at iteration 0", False)
    use_checkpoint_args: bool = flag("take model flags that are not given from the checkpoint", False, needs="load")
    ckpt_step: int | None = flag("iteration to load", derived="the latest", at_least=0, example=100, needs="load")
    load_fallback: bool = flag("load the newest complete checkpoint if that one is damaged", False, needs="load")
    no_verify_checkpoint: bool = flag("load without checking the contents of the files", False, needs="load")
    override_data_order: bool = flag("resume --load with other data, order or sequence length", False, needs="load")
    exit_on_missing_checkpoint: bool = flag("fail if --load has no checkpoint", False, needs="load")
    ckpt_format: str = flag("format of checkpoints", "torch_dist", choices=("torch_dist",))


class Logging(FlagSection, title="validation and logging"):
    """evaluation, log lines, TensorBoard, Weights & Biases"""

    skip_train: bool = flag("only evaluate, on validation and test data", False)
    eval_iters: int = flag("number of global batches per evaluation; 0: none", 100, at_least=0)
    eval_interval: int = flag("number of iterations between evaluations", 1000)
    log_interval: int = flag("number of iterations between log lines", 100)
    tensorboard_dir: str | None = flag("TensorBoard directory", derived="SAVE/tensorboard with --save", unit="DIR")
    wandb_project: str | None = flag("Weights & Biases project; requires the package wandb")
    wandb_exp_name: str | None = flag("Weights & Biases run name")
    wandb_save_dir: str | None = flag("directory of Weights & Biases files", derived="the --save directory", unit="DIR")
    peak_tflops: float | None = flag("peak TFLOP/s of a device, to compute the MFU", derived="known GPUs", example=989)


class Profiling(FlagSection, title="profiling"):
    """traces of some iterations"""

    profile: bool = flag("profile some iterations of some ranks, for nsys or --use-pytorch-profiler", False)
    use_pytorch_profiler: bool = flag("write Chrome traces to --tensorboard-dir instead", False, needs="profile")
    profile_step_start: int = flag("first iteration to profile, counted from 0", 10, at_least=0, needs="profile")
    profile_step_end: int = flag("iteration before which profiling ends", 12, example=12, at_least=1, needs="profile")
    profile_ranks: list[int] = flag("ranks to profile", derived="0", unit="RANK", at_least=0, needs="profile")
