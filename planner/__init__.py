"""Plans training runs: measures a cluster, predicts time and memory, places the ranks, chooses the plan."""
