"""What agents may ask of `bsl`, and do: the tools of `bsl mcp`."""
