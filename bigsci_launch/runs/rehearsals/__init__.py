"""Records of rehearsals: what was rehearsed, at which revision, with which verdict."""
