"""What watchers of a run have left in its directory: findings, acts, signs of life."""
