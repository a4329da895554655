"""Who holds which part of the state, and what has to be sent where. Pure, and apart from any engine's grid."""
