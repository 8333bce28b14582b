"""Measures the cluster it runs on: `cp-cluster-probe`, from a checkout."""

from megatron.context_parallel.commands.programs import cluster_probe

if __name__ == "__main__":
    cluster_probe()
