"""Which way to train a model is fastest on a cluster: `cp-plan-search`, from a checkout."""

from megatron.context_parallel.commands.programs import plan_search

if __name__ == "__main__":
    plan_search()
