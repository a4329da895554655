"""What a setup costs: work counted from its sizes, weighed by constants to seconds and bytes."""
