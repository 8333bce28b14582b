"""Arguments of a run; a test gives only those that it needs."""

from argparse import Namespace

from megatron.context_parallel.trainer.config.flags import FLAGS


class CaseArgs(Namespace):
    """The arguments that a test gives; errors name their flags."""

    declared = FLAGS
