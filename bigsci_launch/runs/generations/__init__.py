"""The generations of an attempt with `survive`, as its controller has recorded them."""
