"""Programs of other people's making, their true states, and how an answer of `bsl spy` about them is scored."""
