"""When a run saves, and how it handles a failed save."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.runtime.comm.first_rank import DiskError
from megatron.context_parallel.runtime.comm.flight_recorder import recorder
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.model.data_parallel import weights_gathered

from .save_load import Save
from .storage import not_saved
from .train_state import TrainState


class Saver:
    """The checkpoints of a run, of which at most one is being written. Every rank calls the same methods.

    A failed save stops the run with a UsageError on every rank. With `--save-on-error continue` it is a warning, unless
    it is the last save. `say` prints a line on the first rank.
    """

    def __init__(self, args: Arguments, state: TrainState, say: Callable[[str], None]) -> None:
        self.args, self.state, self.say = args, state, say
        self.saved = state.progress.iteration
        self.writing: Save | None = None
        self.tolerant = args.save_on_error == "continue"

    def start(self) -> None:
        """Save this iteration; with `--async-save`, only start the save."""
        recorder.enter("save")
        self.finish()
        with self._errors(self.state.progress.iteration), weights_gathered(self.args, self.state.model):
            self.writing = Save(self.args, self.state)
        if not self.args.async_save:
            self.finish()

    def finish_if_written(self) -> None:
        """Finish the save if every rank has written its files."""
        if self.writing and self.writing.is_written():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if any, and make it the latest."""
        save, self.writing = self.writing, None
        if not save:
            return
        recorder.enter("save")
        with self._errors(save.iteration):
            save.finish()
            self.saved = save.iteration
            self.say(f"saved iteration {save.iteration} to {self.args.save}")

    def end(self) -> None:
        """Save the last iteration, unless that is done."""
        self.finish()
        if self.args.save and self.saved != self.state.progress.iteration:
            self.tolerant = False
            self.start()
            self.finish()

    @contextmanager
    def _errors(self, iteration: int) -> Iterator[None]:
        try:
            yield
        except DiskError as error:
            line = not_saved(self.args, iteration, error)
            if not self.tolerant:
                raise UsageError(line) from error
            self.say(f"warning: {line}; training continues")
