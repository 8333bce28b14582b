"""Arguments of a run, but for those that a test does not need."""

from argparse import Namespace

from megatron.context_parallel.trainer.config.flags import FLAGS


class CaseArgs(Namespace):
    """What a test gives of them; a refusal names their flags."""

    declared = FLAGS
