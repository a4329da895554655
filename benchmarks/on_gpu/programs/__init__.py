"""Programs that phases start as processes of their own."""
