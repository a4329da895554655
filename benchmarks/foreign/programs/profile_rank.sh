#!/bin/bash
# Notes when a rank starts and ends, as wrappers of profilers do.
echo "rank $RANK starts"
"$@"
echo "rank $RANK ended with $?"
