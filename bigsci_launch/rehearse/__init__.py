"""A rehearsal: the same run on two nodes, from its start to a resume after a killed rank."""
