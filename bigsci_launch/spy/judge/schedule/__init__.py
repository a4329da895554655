"""Who left the common schedule of collectives, learned from the past of the ranks."""
